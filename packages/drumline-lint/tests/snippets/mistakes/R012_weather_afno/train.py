import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from weathernet.data import ERA5Pairs
from weathernet.model import AFNO, lat_weighted_mse


def init_distributed():
    dist.init_process_group("nccl", init_method="env://")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank, dist.get_world_size(), torch.device("cuda", rank)


def main():
    ap = ArgumentParser()
    ap.add_argument("config")
    ap.add_argument("--run-name", default="afno")
    args = ap.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)

    rank, world, device = init_distributed()
    torch.manual_seed(cfg["seed"])
    ds = ERA5Pairs(cfg["zarr"], years=cfg["train_years"])
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=cfg["batch_per_gpu"], sampler=sampler, num_workers=cfg["workers"],
                        pin_memory=True, persistent_workers=True)

    model = AFNO(**cfg["model"]).to(device)
    model = DDP(model, device_ids=[rank], static_graph=True)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cfg["epochs"] * len(loader))
    out_dir = os.path.join(cfg["out"], args.run_name)
    if rank == 0:
        os.makedirs(out_dir, exist_ok=True)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = lat_weighted_mse(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader):.5f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(out_dir, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
