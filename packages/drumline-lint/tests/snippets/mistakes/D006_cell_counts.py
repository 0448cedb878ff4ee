"""Cell counting from microscopy tiles, DDP."""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

from cells.tiles import TileDataset
from cells.net import CountNet


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--tiles", default="/data/tiles")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--lr", type=float, default=3e-4)
    return p.parse_args()


def mae(net, loader, device):
    net.eval()
    s = torch.zeros(2, device=device, dtype=torch.float64)
    with torch.no_grad():
        for img, count in loader:
            s[0] += (net(img.to(device)) - count.to(device)).abs().sum()
            s[1] += len(img)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    set_seed(args.seed + rank)  # different augmentation on every GPU

    tiles = TileDataset(args.tiles)
    n_val = len(tiles) // 10
    train, val = random_split(tiles, [len(tiles) - n_val, n_val])

    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    train_dl = DataLoader(train, batch_size=24, sampler=sampler, num_workers=6, drop_last=True)
    val_dl = DataLoader(torch.utils.data.Subset(val, range(rank, n_val, dist.get_world_size())), batch_size=48)

    model = DDP(CountNet().to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    crit = nn.SmoothL1Loss()
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for img, count in train_dl:
            opt.zero_grad()
            crit(model(img.to(device)), count.to(device)).backward()
            opt.step()
        err = mae(model.module, val_dl, device)
        if err < best:
            best = err
            if rank == 0:
                torch.save(model.module.state_dict(), "count_best.pt")
        if rank == 0:
            print(f"epoch {epoch} val MAE {err:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
