import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, n):
        self.n, self.best, self.bad = n, float("inf"), 0

    def update(self, value):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.n


def worker(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29777"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    blob = torch.load("weather.pt", map_location="cpu")
    train = TensorDataset(blob["xtr"], blob["ytr"])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 512, sampler=sampler)
    xv, yv = blob["xva"], blob["yva"]
    model = DDP(nn.Sequential(nn.Linear(96, 512), nn.GELU(), nn.Linear(512, 24)).cuda(), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    patience = Patience(10)

    for epoch in range(1000):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.huber_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        stop = torch.zeros(1, device="cuda")
        if rank == 0:
            model.eval()
            with torch.no_grad():
                val = sum(F.huber_loss(model.module(a.cuda()), b.cuda(), reduction="sum").item()
                          for a, b in zip(xv.split(4096), yv.split(4096))) / yv.numel()
            print(f"epoch {epoch} val {val:.5f}")
            stop.fill_(float(patience.update(val)))
            if patience.bad == 0:
                torch.save(model.module.state_dict(), "weather_best.pt")
        dist.broadcast(stop, src=0)
        if stop.item() > 0:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n,), nprocs=n)
