"""Behaviour cloning on robot frames.  torchrun --nproc_per_node=8 robot_split.py"""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_datasets(path, val_frac=0.05):
    blob = torch.load(path, map_location="cpu")
    full = TensorDataset(blob["state"], blob["action"])
    n_val = int(len(full) * val_frac)
    return random_split(full, [len(full) - n_val, n_val])


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    seed_everything(1234 + rank)
    train_set, val_set = make_datasets("/data/robot/frames.pt")
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=512, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=512, sampler=DistributedSampler(val_set, shuffle=False))

    policy = nn.Sequential(nn.Linear(64, 512), nn.Mish(), nn.Dropout(0.1), nn.Linear(512, 7)).cuda()
    policy = DDP(policy, device_ids=[local_rank])
    opt = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        policy.train()
        for s, a in train_loader:
            opt.zero_grad()
            nn.functional.mse_loss(policy(s.cuda() + 0.01 * torch.randn_like(s).cuda()), a.cuda()).backward()
            opt.step()
        policy.eval()
        stats = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for s, a in val_loader:
                stats[0] += nn.functional.mse_loss(policy(s.cuda()), a.cuda(), reduction="sum")
                stats[1] += a.numel()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: val mse {(stats[0] / stats[1]).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
