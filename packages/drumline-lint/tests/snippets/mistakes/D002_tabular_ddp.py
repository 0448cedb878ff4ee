"""Tabular regression with early stopping; torchrun --nproc_per_node=4 D002_tabular_ddp.py"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

PATIENCE = 6
MAX_EPOCHS = 200


def load(split):
    blob = np.load(f"data/{split}.npz")
    return TensorDataset(torch.from_numpy(blob["x"]).float(), torch.from_numpy(blob["y"]).float())


def validate(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            err = (model(x.to(device)).squeeze(-1) - y.to(device)).pow(2)
            acc[0] += err.sum()
            acc[1] += err.numel()
    dist.reduce(acc, dst=0, op=dist.ReduceOp.SUM)
    return (acc[0] / acc[1]).item()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train, val = load("train"), load("val")
    sampler = DistributedSampler(train, shuffle=True, seed=11)
    train_loader = DataLoader(train, batch_size=1024, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=4096)

    net = nn.Sequential(nn.Linear(54, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    net = DDP(net.to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)

    best, bad = float("inf"), 0
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            loss = (net(x.to(device)).squeeze(-1) - y.to(device)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

        mse = validate(net.module, val_loader, device)
        if mse < best:
            best, bad = mse, 0
            if rank == 0:
                torch.save(net.module.state_dict(), "best.pt")
        else:
            bad += 1
        if rank == 0:
            print(f"epoch {epoch}: val mse {mse:.5f} (best {best:.5f})", flush=True)
        if bad >= PATIENCE:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
