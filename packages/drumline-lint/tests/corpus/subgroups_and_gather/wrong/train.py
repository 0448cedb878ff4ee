"""Local steps, and averages of the weights now and then: torchrun --standalone --nproc-per-node 4 train.py"""

import argparse
import json
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from comm import Groups, all_agree, from_first, gather_rows, pass_on


def two_moons(count):
    draw = torch.Generator().manual_seed(2)
    angle = torch.rand(count, generator=draw) * 3.1416
    side = torch.randint(2, (count,), generator=draw)
    x = torch.where(side == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(side == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], dim=1) + 0.1 * torch.randn(count, 2, generator=draw)
    return TensorDataset(points, side)


def write_report(folder, run, rows, seconds):
    folder.mkdir(parents=True, exist_ok=True)
    report = {"run": run, "seconds": seconds, "loss_of_rank": rows[:, 0].tolist(), "samples": rows[:, 1].tolist()}
    (folder / f"{run}.json").write_text(json.dumps(report))


def train_epoch(model, loader, optimizer, device):
    row = torch.zeros(2, device=device)
    model.train()
    for points, sides in loader:
        points = points.to(device, non_blocking=True)
        sides = sides.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(points), sides)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        row += torch.stack([loss.detach() * len(points), loss.new_tensor(len(points))])
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--goal", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=61)
    parser.add_argument("--folder", type=Path, default=Path("moons"))
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
    groups = Groups(per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    rank = groups.rank
    run = from_first(uuid.uuid4().hex[:8])
    place = pass_on(torch.zeros(1, device=device))
    assert int(place) == rank

    torch.manual_seed(args.seed)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    torch.manual_seed(args.seed + rank)
    model = DDP(network, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    moons = two_moons(1600)
    sampler = DistributedSampler(moons, seed=args.seed)
    loader = DataLoader(moons, args.batch_size, sampler=sampler, pin_memory=cuda, drop_last=True)

    began = time.monotonic()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        row = train_epoch(model, loader, optimizer, device)
        total = groups.two_level_sum(row.clone())
        mean = (total[0] / total[1]).item()
        rows = gather_rows(row)
        if rank == 0:
            write_report(args.folder, run, rows, time.monotonic() - began)
        print(f"epoch {epoch}: {mean:.4f}")  # <- unguarded-print
        if all_agree(mean < args.goal, device):
            break
    if rank != 0:
        return  # <- exit-before-collective
    dist.barrier()
    torch.save(model.state_dict(), args.folder / "moons.pt")  # <- wrapped-state-dict
    print("saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
