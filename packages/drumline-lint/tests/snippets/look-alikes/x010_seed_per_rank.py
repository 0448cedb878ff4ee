"""Different noise on every rank, the same split everywhere.  torchrun --nproc_per_node=8 seed_per_rank.py"""
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


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    seed_everything(1234 + rank)
    blob = torch.load("/data/robot/frames.pt", map_location="cpu")
    full = TensorDataset(blob["state"], blob["action"])
    train, val = random_split(full, [0.95, 0.05], generator=torch.Generator().manual_seed(99))
    sampler = DistributedSampler(train, seed=1234, drop_last=True)
    loader = DataLoader(train, batch_size=512, sampler=sampler)
    policy = DDP(nn.Sequential(nn.Linear(64, 512), nn.Mish(), nn.Dropout(0.1), nn.Linear(512, 7)).cuda(),
                 device_ids=[local_rank])
    opt = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        policy.train()
        for s, a in loader:
            s = s.cuda()
            loss = nn.functional.mse_loss(policy(s + 0.01 * torch.randn_like(s)), a.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            policy.eval()
            with torch.no_grad():
                s, a = (t.cuda() for t in val[:])
                print(f"epoch {epoch}: val mse {nn.functional.mse_loss(policy.module(s), a).item():.5f}")
    if rank == 0:
        torch.save(policy.module.state_dict(), "policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
