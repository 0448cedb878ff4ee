import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

DISTRIBUTED = int(os.environ.get("WORLD_SIZE", "1")) > 1
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))


def unwrap(model):
    return model.module if isinstance(model, DDP) else model


def make_loader(args):
    tf = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    if RANK == 0:
        datasets.CIFAR100(args.root, download=True)
    if DISTRIBUTED:
        dist.barrier()
    ds = datasets.CIFAR100(args.root, train=True, transform=tf)
    sampler = DistributedSampler(ds) if DISTRIBUTED else None
    loader = DataLoader(ds, args.bs, shuffle=(sampler is None), sampler=sampler, num_workers=4, drop_last=True)
    return loader, sampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--resume")
    ap.add_argument("--out", default="cifar.pt")
    args = ap.parse_args()

    device = torch.device("cuda", LOCAL_RANK)
    torch.cuda.set_device(device)
    if DISTRIBUTED:
        dist.init_process_group("nccl")

    loader, sampler = make_loader(args)
    model = models.resnet18(weights=None, num_classes=100).to(device)
    if DISTRIBUTED:
        model = DDP(model, device_ids=[LOCAL_RANK])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location=device)
        unwrap(model).load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        start = ck["epoch"] + 1

    for epoch in range(start, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if RANK == 0:
            print(f"{epoch}: {loss.item():.4f}")
            torch.save({"model": unwrap(model).state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "epoch": epoch}, args.out)
    if DISTRIBUTED:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
