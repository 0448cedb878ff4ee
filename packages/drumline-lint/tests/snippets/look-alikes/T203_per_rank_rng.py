import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = Path("ckpt")


def rng_state():
    return {"py": random.getstate(), "np": np.random.get_state(), "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state()}


def set_rng_state(s):
    random.setstate(s["py"])
    np.random.set_state(s["np"])
    torch.set_rng_state(s["cpu"])
    torch.cuda.set_rng_state(s["cuda"])


def save(model, opt, epoch, rank):
    CKPT.mkdir(exist_ok=True)
    torch.save(rng_state(), CKPT / f"rng_rank{rank}.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, CKPT / "last.pt")
    dist.barrier()


def load(model, opt, rank, device):
    if not (CKPT / "last.pt").exists():
        return 0
    state = torch.load(CKPT / "last.pt", map_location=device)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    set_rng_state(torch.load(CKPT / f"rng_rank{rank}.pt", map_location="cpu", weights_only=False))
    return state["epoch"] + 1


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)

    blob = torch.load("data/spectra.pt", map_location="cpu")
    ds = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Dropout(0.4), nn.Linear(1024, 12))
    model = DDP(net.to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), 1e-3)

    start = load(model, opt, rank, device)
    dist.barrier()
    for epoch in range(start, 50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x.to(device) + 0.01 * torch.randn(x.shape, device=device)
            loss = nn.functional.mse_loss(model(x), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        save(model, opt, epoch, rank)
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
