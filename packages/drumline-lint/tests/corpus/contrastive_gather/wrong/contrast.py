"""Two views of a sample should be near each other, and far from all samples of all ranks.

    torchrun --standalone --nproc-per-node 4 contrast.py --steps 100
"""

import argparse
import copy
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class TwoViews(Dataset):
    def __init__(self, count=1500, width=24):
        draw = torch.Generator().manual_seed(31)
        self.samples = torch.randn(count, width, generator=draw)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        return tuple(sample + 0.2 * torch.randn_like(sample) for _ in range(2))


class Encoder(nn.Module):
    def __init__(self, width=24, code=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.projector = nn.Linear(32, code)
        self.rotation = nn.Linear(32, 4)

    def forward(self, view):
        inner = self.trunk(view)
        code = F.normalize(self.projector(inner), dim=1)
        return code, self.rotation(inner)


class Teacher:
    """A slow average of the student; the same on every rank, as the student is."""

    def __init__(self, network, momentum=0.99):
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def follow(self, student):
        for mine, theirs in zip(self.network.parameters(), student.parameters()):
            mine.lerp_(theirs, 1 - self.momentum)


def info_nce(queries, keys, temperature=0.1):
    everywhere = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, keys)
    all_keys = torch.cat(everywhere)
    first = dist.get_rank() * len(queries)
    targets = torch.arange(first, first + len(queries), device=queries.device)
    return F.cross_entropy(queries @ all_keys.T / temperature, targets)


def agreement(codes, keys):
    """How many of all ranks' samples find their own second view; the counts are the same on all ranks."""
    hits = ((codes @ keys.T).argmax(dim=1) == torch.arange(len(codes), device=codes.device)).sum()
    both = torch.stack([hits, torch.tensor(len(codes), device=codes.device)])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def set_up():
    local_rank = int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        return torch.device("cpu")
    torch.zeros(1, device="cuda")
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", init_method="tcp://192.168.1.20:23456", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(minutes=10))
    torch.cuda.set_device(device)
    return device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--patience", type=float, default=0.999)
    parser.add_argument("--out", default="contrast.pt")
    args = parser.parse_args()
    device = set_up()
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    encoder = Encoder()
    encoder.to(device)
    teacher = Teacher(encoder)
    student = DDP(encoder, device_ids=None if device.type == "cpu" else [device])  # <- batch-norm-not-synced
    torch.manual_seed(args.seed + 31 * rank)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    views = TwoViews()
    sampler = DistributedSampler(views, seed=args.seed)
    loader = DataLoader(views, args.batch_size, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")
    for step, (one, two) in zip(range(args.steps), endless(loader, sampler)):
        one, two = one.to(device, non_blocking=True), two.to(device, non_blocking=True)
        codes, turned = student(one)
        with torch.no_grad():
            keys, _ = teacher.network(two)
        loss = info_nce(codes, keys)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        teacher.follow(encoder)
        if step % 20 == 0:
            if rank == 0:
                share = agreement(codes.detach(), keys)  # <- collective-on-some-ranks
                print(f"step {step}: loss {loss.item():.3f}, {share:.1%} found")
                if share > args.patience:
                    break  # <- exit-before-collective
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        torch.save({"student": encoder.state_dict(), "teacher": teacher.network.state_dict()}, args.out)  # <- local-rank-save
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
