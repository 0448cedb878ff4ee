"""Pipeline: the first half of the ranks trains the generator side, the second half
renders and scores. Each side averages its own gradients within its group."""
import argparse
import datetime
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, z=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 512), nn.GELU(), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 784))

    def forward(self, z):
        return torch.tanh(self.net(z))


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def make_group(rank, world_size):
    half = world_size // 2
    gen_ranks = list(range(half))
    score_ranks = list(range(half, world_size))
    if rank in gen_ranks:
        group = dist.new_group(gen_ranks, timeout=datetime.timedelta(minutes=20))
        role = "generator"
    else:
        group = dist.new_group(score_ranks, timeout=datetime.timedelta(minutes=20))
        role = "scorer"
    return role, group


def train_generator(model, opt, device, args, group):
    for step in range(args.steps):
        z = torch.randn(args.batch, args.z, device=device)
        loss = model(z).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.log_every == 0 and dist.get_rank() == 0:
            print("gen", step, loss.item(), flush=True)


def train_scorer(model, opt, device, args, group):
    bce = nn.BCEWithLogitsLoss()
    for step in range(args.steps):
        x = torch.randn(args.batch, 784, device=device)
        y = (x.mean(1) > 0).float()
        loss = bce(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.log_every == 0 and dist.get_rank(group) == 0:
            print("score", step, loss.item(), flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=10000)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--z", type=int, default=64)
    ap.add_argument("--log-every", type=int, default=200)
    ap.add_argument("--out", default="out")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size % 2 == 0, "need an even number of ranks"
    torch.manual_seed(17 + rank)
    device = torch.device("cuda", local_rank)

    role, group = make_group(rank, world_size)
    net = Generator(args.z) if role == "generator" else Scorer()
    model = DDP(net.to(device), device_ids=[local_rank], process_group=group)
    opt = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))

    if role == "generator":
        train_generator(model, opt, device, args, group)
    else:
        train_scorer(model, opt, device, args, group)

    if dist.get_rank(group) == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(args.out, f"{role}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
