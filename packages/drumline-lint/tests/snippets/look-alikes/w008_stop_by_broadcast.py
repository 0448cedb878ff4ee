"""torchrun --nproc_per_node=2 forecast.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from load import LoadSeries, TemporalNet

PATIENCE = 10


def main():
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = LoadSeries("train"), LoadSeries("val")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 128, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 256)
    net = DDP(TemporalNet().cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    best, bad = float("inf"), 0

    for epoch in range(500):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            opt.zero_grad()
            F.mse_loss(net(x.cuda()), y.cuda()).backward()
            opt.step()
        err = torch.zeros(2, device="cuda")
        net.eval()
        with torch.no_grad():
            for x, y in val_loader:
                err[0] += F.mse_loss(net.module(x.cuda()), y.cuda(), reduction="sum")
                err[1] += y.numel()
        dist.all_reduce(err)
        stop = torch.zeros(1, device="cuda")
        if rank == 0:
            mse = (err[0] / err[1]).item()
            best, bad = (mse, 0) if mse < best else (best, bad + 1)
            stop.fill_(float(bad >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    if rank == 0:
        torch.save(net.module.state_dict(), "forecast.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
