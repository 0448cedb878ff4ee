import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, limit):
        self.limit, self.bad, self.best = limit, 0, float("inf")

    def should_stop(self, value):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.limit


def val_loss(model, loader, rank):
    model.eval()
    sums = torch.zeros(2, device=rank)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(rank), y.to(rank)
            sums[0] += (model(x) - y).square().sum()
            sums[1] += y.numel()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def run(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29512"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(rank)
    model = DDP(net, device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    train = TensorDataset(*torch.load("train.pt", map_location="cpu"))
    val = TensorDataset(*(t[rank::world_size] for t in torch.load("val.pt", map_location="cpu")))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 512, sampler=sampler)
    val_loader = DataLoader(val, 512)
    patience = Patience(limit=5)

    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x.to(rank)), y.to(rank)).backward()
            opt.step()
        if patience.should_stop(val_loss(model.module, val_loader, rank)):
            print(f"rank {rank}: stop at epoch {epoch}")
            break

    if rank == 0:
        torch.save(model.module.state_dict(), "regressor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(run, args=(n,), nprocs=n, join=True)
