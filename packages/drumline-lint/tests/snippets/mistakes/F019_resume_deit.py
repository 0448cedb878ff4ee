import argparse
import os
from datetime import timedelta

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder


def parse():
    p = argparse.ArgumentParser("DeiT-B fine-tuning")
    p.add_argument("--data", default="/datasets/inat19/train")
    p.add_argument("--classes", type=int, default=1010)
    p.add_argument("--resume", default="")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--out", default="out/deit_b")
    return p.parse_args()


def setup():
    dist.init_process_group("nccl", timeout=timedelta(minutes=20))
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    return dist.get_rank(), gpu


def save(path, model, optimizer, scaler, scheduler, epoch):
    tmp = path + ".tmp"
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def main():
    args = parse()
    rank, gpu = setup()
    os.makedirs(args.out, exist_ok=True)

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandAugment(),
                             transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    dataset = ImageFolder(args.data, tf)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, args.batch, sampler=sampler, num_workers=10, drop_last=True, pin_memory=True)

    model = timm.create_model("deit_base_patch16_224", num_classes=args.classes, drop_path_rate=0.1)
    model = DDP(model.cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.cuda.amp.GradScaler()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=args.classes)
    criterion = SoftTargetCrossEntropy()

    start = 0
    if args.resume:
        ckpt = torch.load(args.resume)
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        scaler.load_state_dict(ckpt["scaler"])
        start = ckpt["epoch"] + 1

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.cuda(gpu, non_blocking=True), labels.cuda(gpu, non_blocking=True)
            images, labels = mixup(images, labels)
            with torch.cuda.amp.autocast():
                loss = criterion(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} last loss {loss.item():.4f}", flush=True)
            save(os.path.join(args.out, "last.pth"), model, optimizer, scaler, scheduler, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
