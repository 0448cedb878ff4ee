"""MixUp training where each process must augment differently."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from foods.data import Foods
from foods.net import convnext_tiny

SEED = 1312


def seed_all(value):
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def split(n, val_share=0.1):
    order = np.random.RandomState(SEED).permutation(n)
    cut = int(n * val_share)
    return order[cut:].tolist(), order[:cut].tolist()


def mixup(x, y, classes, alpha=0.2):
    lam = float(np.random.beta(alpha, alpha))
    perm = torch.randperm(len(x), device=x.device)
    t = nn.functional.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[perm], lam * t + (1 - lam) * t[perm]


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    seed_all(SEED + 1000 * rank)

    foods = Foods("/data/foods")
    train_idx, val_idx = split(len(foods))
    train = Subset(foods, train_idx)
    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=8, drop_last=True)
    val_dl = DataLoader(Subset(foods, val_idx[rank::world]), 128, num_workers=4)
    model = DDP(convnext_tiny(101).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4)

    for epoch in range(90):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, t = mixup(x.cuda(non_blocking=True), y.cuda(non_blocking=True), 101)
            loss = nn.functional.cross_entropy(model(x), t)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        model.eval()
        c = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_dl:
                c[0] += (model.module(x.cuda()).argmax(-1) == y.cuda()).sum()
                c[1] += len(y)
        dist.all_reduce(c)
        if rank == 0:
            print(f"epoch {epoch} acc {(c[0] / c[1]).item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "foods.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
