# torchrun --standalone --nproc_per_node=4 micro_steps.py
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
    for i, (x, y) in enumerate(loader):
        sync_now = i % MICRO_STEPS == 0
        with nullcontext() if sync_now else model.no_sync():
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            (loss / MICRO_STEPS).backward()
        if i % MICRO_STEPS == MICRO_STEPS - 1:
            opt.step()
            opt.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/proteins/train.pt", map_location="cpu")
    data = TensorDataset(blob["tokens"], blob["family"])
    n_use = len(data) - len(data) % (32 * MICRO_STEPS * dist.get_world_size())
    data = torch.utils.data.Subset(data, range(n_use))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

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
