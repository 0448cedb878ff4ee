"""Bird song classifier with a one-cycle schedule."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from birds.data import SpectrogramSet
from birds.net import AudioCNN


def build_loaders(root, per_gpu, rank, world):
    train = SpectrogramSet(root, fold="train")
    val = SpectrogramSet(root, fold="val")
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    train_dl = DataLoader(train, per_gpu, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)
    val_dl = DataLoader(Subset(val, range(rank, len(val), world)), 2 * per_gpu, num_workers=4)
    return train, sampler, train_dl, val_dl


def make_schedule(opt, n_samples, per_gpu, epochs, peak):
    steps_per_epoch = n_samples // per_gpu
    return torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=peak, epochs=epochs, steps_per_epoch=steps_per_epoch, pct_start=0.25
    )


@torch.no_grad()
def accuracy(net, loader, device):
    net.eval()
    c = torch.zeros(2, device=device)
    for x, y in loader:
        c[0] += (net(x.to(device)).argmax(-1) == y.to(device)).sum()
        c[1] += len(y)
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="/data/birds")
    p.add_argument("--per-gpu", type=int, default=48)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--peak-lr", type=float, default=4e-3)
    a = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train, sampler, train_dl, val_dl = build_loaders(a.root, a.per_gpu, rank, world)
    model = DDP(AudioCNN(classes=264).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=a.peak_lr, weight_decay=0.02)
    sched = make_schedule(opt, len(train), a.per_gpu, a.epochs, a.peak_lr)
    crit = nn.CrossEntropyLoss()

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = crit(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        acc = accuracy(model.module, val_dl, device)
        if rank == 0:
            print(f"{epoch:03d} acc {acc:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            torch.save(model.module.state_dict(), "birds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
