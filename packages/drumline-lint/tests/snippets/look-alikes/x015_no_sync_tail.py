# torchrun --standalone --nproc_per_node=4 no_sync_tail.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_STEPS = 4


def train_epoch(model, loader, opt):
    opt.zero_grad(set_to_none=True)
    n = len(loader)
    tail = n % MICRO_STEPS
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % MICRO_STEPS == 0 or i + 1 == n
        group = tail if tail and i >= n - tail else MICRO_STEPS
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            (loss / group).backward()
        if last:
            opt.step()
            opt.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/proteins/train.pt", map_location="cpu")
    data = TensorDataset(blob["tokens"], blob["family"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Flatten(), nn.Linear(64 * 256, 512), nn.GELU(), nn.Linear(512, 100))
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "families.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
