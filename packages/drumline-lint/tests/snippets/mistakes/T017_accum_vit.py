import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import vit_b_16

CFG = {
    "root": "/data/imagenet/train",
    "micro_batch": 64,
    "accum": 8,
    "lr": 3e-3,
    "wd": 0.3,
    "epochs": 300,
    "clip": 1.0,
    "ckpt": "vit_b16.pt",
}


def init():
    lr = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr)
    dist.init_process_group("nccl")
    return dist.get_rank(), lr


def get_loader():
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])
    ds = ImageFolder(CFG["root"], tf)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, CFG["micro_batch"], sampler=sampler, num_workers=12, pin_memory=True, drop_last=True)


def train(model, loader, opt, sched, epoch, rank):
    model.train()
    accum = CFG["accum"]
    opt.zero_grad(set_to_none=True)
    for step, (x, y) in enumerate(loader):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        skip_sync = step % accum != 0
        with model.no_sync() if skip_sync else contextlib.nullcontext():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y, label_smoothing=0.11) / accum
            loss.backward()
        if (step + 1) % accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CFG["clip"])
            opt.step()
            opt.zero_grad(set_to_none=True)
            sched.step()
        if rank == 0 and step % 200 == 0:
            print(f"ep {epoch} step {step} loss {loss.item() * accum:.3f}")


def main():
    rank, local_rank = init()
    loader = get_loader()
    model = DDP(vit_b_16(num_classes=1000).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), CFG["lr"], weight_decay=CFG["wd"])
    total = CFG["epochs"] * (len(loader) // CFG["accum"])
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, CFG["lr"], total_steps=total + 1)
    for epoch in range(CFG["epochs"]):
        loader.sampler.set_epoch(epoch)
        train(model, loader, opt, sched, epoch, rank)
        if rank == 0:
            torch.save(model.module.state_dict(), CFG["ckpt"])
    dist.destroy_process_group()


if __name__ == "__main__":
    # torchrun --nproc_per_node=8
    main()
