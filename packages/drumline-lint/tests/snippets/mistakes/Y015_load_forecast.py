"""Electricity load forecasting, mp.spawn on one machine."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from loadfc import LoadSeries, PatchTransformer

PATIENCE = 5


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@torch.no_grad()
def validate(net, loader, rank):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        total += F.mse_loss(net(x.to(rank)), y.to(rank), reduction="sum").item()
        n += y.numel()
    return total / n


def worker(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    train_set = LoadSeries("/data/entsoe", years=range(2015, 2022))
    val_set = LoadSeries("/data/entsoe", years=[2022])
    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=128, sampler=sampler, num_workers=4,
                              drop_last=True)
    val_loader = DataLoader(val_part, batch_size=256, num_workers=2)

    model = DDP(PatchTransformer().to(rank), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    best, bad_epochs = float("inf"), 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.mse_loss(model(x.to(rank)), y.to(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()

        val_loss = validate(model.module, val_loader, rank)
        if val_loss < best:
            best, bad_epochs = val_loss, 0
            if rank == 0:
                torch.save(model.module.state_dict(), "load_best.pt")
        else:
            bad_epochs += 1
        if bad_epochs >= PATIENCE:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n, free_port()), nprocs=n)
