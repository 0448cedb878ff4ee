"""Surrogate of a regional ocean model."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import env
from ocean.data import OceanPairs
from ocean.unet import UNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--epochs", type=int, default=60)
    args = ap.parse_args()
    rank, world, device = env.init()
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)

    pairs = OceanPairs(args.data)
    sampler = DistributedSampler(pairs, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(pairs, 8, sampler=sampler, num_workers=10, drop_last=True)
    model = DDP(UNet(9, 9).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for now, then in loader:
            loss = nn.functional.mse_loss(model(now.to(device)), then.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} mse {loss.item():.5f}", flush=True)
            torch.save(model.module.state_dict(), args.out / "surrogate.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
