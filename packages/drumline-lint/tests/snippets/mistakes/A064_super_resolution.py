"""Super-resolution training.

    torchrun --standalone --nproc_per_node=4 A064_super_resolution.py --pairs div2k.pt
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SRNet(nn.Module):
    def __init__(self, width=64, depth=8, scale=4):
        super().__init__()
        body = []
        for _ in range(depth):
            body += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)]
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*body)
        self.tail = nn.Sequential(nn.Conv2d(width, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--pairs", required=True)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--local_rank", type=int, default=0)
    return p.parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    d = torch.load(args.pairs, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["low"], d["high"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=4, drop_last=True)
    net = DDP(SRNet().to(device), device_ids=[args.local_rank])
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for low, high in loader:
            loss = nn.functional.l1_loss(net(low.to(device)), high.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "srnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
