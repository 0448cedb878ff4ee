# torchrun --nproc_per_node=8 layer_drop.py --keep 0.9
import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DropNet(nn.Module):
    def __init__(self, width=512, depth=12, keep=0.9):
        super().__init__()
        self.keep = keep
        self.inp = nn.Linear(128, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(width, 20)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            if self.training and random.random() > self.keep:
                continue
            h = h + block(h)
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--keep", type=float, default=0.9)
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/sensors.pt", map_location="cpu")
    data = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    net = DDP(DropNet(keep=args.keep).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "dropnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
