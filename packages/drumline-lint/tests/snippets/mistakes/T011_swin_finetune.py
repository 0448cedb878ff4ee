import argparse
import os
import torch
import torch.distributed as dist
import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms as T


def parse():
    p = argparse.ArgumentParser("Swin fine-tuning (run with torchrun)")
    p.add_argument("--data", default="/data/inat21")
    p.add_argument("--resume", default="")
    p.add_argument("--output", default="out")
    p.add_argument("--epochs", default=30, type=int)
    p.add_argument("--bs", default=32, type=int)
    p.add_argument("--lr", default=5e-5, type=float)
    return p.parse_args()


def save(path, model, opt, sched, scaler, epoch):
    torch.save({
        "model": model.module.state_dict(),
        "opt": opt.state_dict(),
        "sched": sched.state_dict(),
        "scaler": scaler.state_dict(),
        "epoch": epoch,
    }, path)


def resume(path, model, opt, sched, scaler):
    ckpt = torch.load(path)
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    sched.load_state_dict(ckpt["sched"])
    scaler.load_state_dict(ckpt["scaler"])
    return ckpt["epoch"] + 1


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    main_proc = dist.get_rank() == 0
    if main_proc:
        os.makedirs(args.output, exist_ok=True)

    ds = datasets.ImageFolder(f"{args.data}/train", T.Compose([
        T.RandomResizedCrop(224, scale=(0.3, 1)), T.RandAugment(), T.ToTensor(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=len(ds.classes))

    net = timm.create_model("swin_base_patch4_window7_224", pretrained=False, num_classes=len(ds.classes)).cuda()
    opt = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    scaler = torch.cuda.amp.GradScaler()
    loss_fn = SoftTargetCrossEntropy()

    start = resume(args.resume, net, opt, sched, scaler) if args.resume else 0
    model = DDP(net, device_ids=[local_rank])

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = mixup(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        if main_proc:
            print(f"{epoch=} {loss.item()=:.4f}")
            save(f"{args.output}/ckpt.pt", model, opt, sched, scaler, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
