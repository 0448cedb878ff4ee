import argparse
import os

import timm
import torch
import torch.distributed as dist
from timm.data import create_transform
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder


def loaders(args, rank, world):
    train = ImageFolder(f"{args.data}/train", create_transform(224, is_training=True, auto_augment="rand-m7"))
    val = ImageFolder(f"{args.data}/val", create_transform(224))
    ts = DistributedSampler(train, world, rank, shuffle=True, drop_last=True)
    mine = Subset(val, range(rank, len(val), world))
    kw = dict(batch_size=args.bs, num_workers=8, pin_memory=True)
    return ts, DataLoader(train, sampler=ts, drop_last=True, **kw), DataLoader(mine, **kw)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hit = seen = 0
    for x, y in loader:
        pred = model(x.cuda(non_blocking=True)).argmax(1)
        hit += (pred == y.cuda(non_blocking=True)).sum().item()
        seen += y.numel()
    return 100.0 * hit / seen


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--arch", default="convnext_tiny")
    p.add_argument("--bs", type=int, default=96)
    p.add_argument("--epochs", type=int, default=50)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    sampler, train_loader, val_loader = loaders(args, rank, world)
    model = timm.create_model(args.arch, pretrained=True, num_classes=120).cuda()
    model = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    best = 0.0

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x.cuda(non_blocking=True)),
                                                         y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()

        acc = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: val acc {acc:.2f}%")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "best.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
