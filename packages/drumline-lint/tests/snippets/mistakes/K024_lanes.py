"""Lane detection. Launched by: torchrun --standalone --nproc_per_node=4 K024_lanes.py"""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--frames", default="/data/culane/frames.pt")
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--bs", type=int, default=24)
    p.add_argument("--local_rank", type=int, default=-1)
    return p.parse_args()


def lane_net():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(64, 5, 1))


def main():
    args = get_args()
    distributed = args.local_rank != -1
    if distributed:
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group("nccl")
    rank = dist.get_rank() if distributed else 0
    d = torch.load(args.frames, map_location="cpu")
    ds = TensorDataset(d["rgb"], d["lane"])
    sampler = DistributedSampler(ds, drop_last=True) if distributed else None
    loader = DataLoader(ds, args.bs, sampler=sampler, shuffle=sampler is None,
                        num_workers=4, drop_last=True)
    net = lane_net().cuda()
    if distributed:
        net = DistributedDataParallel(net, device_ids=[args.local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for rgb, lane in loader:
            loss = nn.functional.cross_entropy(net(rgb.cuda()), lane.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            m = net.module if distributed else net
            torch.save(m.state_dict(), f"lanes_{epoch}.pt")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
