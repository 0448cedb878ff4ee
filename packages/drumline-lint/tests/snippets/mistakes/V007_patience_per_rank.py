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


def loaders():
    train = TensorDataset(*torch.load("train.pt", map_location="cpu"))
    val = TensorDataset(*torch.load("val.pt", map_location="cpu"))
    ts, vs = DistributedSampler(train), DistributedSampler(val, shuffle=False)
    return DataLoader(train, 512, sampler=ts), DataLoader(val, 512, sampler=vs), ts


def run(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29512"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(rank)
    model = DDP(net, device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    train_loader, val_loader, sampler = loaders()
    patience = Patience(limit=5)

    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            loss_fn(model(x.to(rank)), y.to(rank)).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            losses = [loss_fn(model(x.to(rank)), y.to(rank)).item() for x, y in val_loader]
        val_loss = sum(losses) / len(losses)
        if patience.should_stop(val_loss):
            print(f"rank {rank}: stop at epoch {epoch}")
            break

    if rank == 0:
        torch.save(model.module.state_dict(), "regressor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(run, args=(n,), nprocs=n, join=True)
