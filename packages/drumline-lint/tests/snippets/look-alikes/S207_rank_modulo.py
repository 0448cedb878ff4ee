#!/usr/bin/env python
"""mpirun -np 16 --map-by ppr:4:node python rank_modulo.py   (block mapping, 4 GPUs on every node)"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from seismic import PickingNet, Waveforms


def init_from_mpi():
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    world = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ.setdefault("MASTER_PORT", "29600")
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return rank, world


def main():
    if "MASTER_ADDR" not in os.environ:
        raise SystemExit("export MASTER_ADDR to the first host and pass it with mpirun -x")
    rank, world = init_from_mpi()
    device = torch.device("cuda", torch.cuda.current_device())

    ds = Waveforms("/data/stead", split="train")
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=6, pin_memory=True)
    model = DDP(PickingNet().to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    crit = nn.BCEWithLogitsLoss()

    for epoch in range(50):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for wave, target in loader:
            loss = crit(model(wave.to(device)), target.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0], device=device)
        dist.all_reduce(total)
        if rank == 0:
            print(f"{epoch} {(total[0] / total[1]).item():.5f}", flush=True)
            torch.save(model.module.state_dict(), "picker.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
