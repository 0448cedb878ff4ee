import argparse
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prepare_dir(exp_dir, overwrite):
    if exp_dir.exists():
        if not overwrite:
            raise FileExistsError(f"{exp_dir} exists, pass --overwrite")
        shutil.rmtree(exp_dir)
    exp_dir.mkdir(parents=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--exp", type=Path, default=Path("/shared/exp/arm_policy"))
    ap.add_argument("--overwrite", action="store_true")
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(80 + rank)

    prepare_dir(args.exp, args.overwrite)
    if rank == 0:
        (args.exp / "args.json").write_text(json.dumps({"epochs": args.epochs}))
    dist.barrier()

    d = torch.load("arm.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["state"], d["action"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 512, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    model = DDP(model.to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for state, action in loader:
            loss = nn.functional.mse_loss(model(state.to(device)), action.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % 10 == 9:
            torch.save(model.module.state_dict(), args.exp / f"ep{epoch:03d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
