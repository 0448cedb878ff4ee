"""Kinds of ponds by their depths: torchrun --standalone --nproc-per-node 2 train.py"""

import argparse
import copy
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from judging import Judge, confusion, mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

KINDS = 3


class Ponds(Dataset):
    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(KINDS, (), generator=draw))
        return torch.randn(16, generator=draw) + kind, kind


class Sounder(nn.Module):
    """Its running means are buffers."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, KINDS))

    def forward(self, depths):
        return self.layers(depths)


class Probe(nn.Module):
    """It has no buffers: without a backward pass its wrapper has nothing to tell other ranks."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, KINDS)

    def forward(self, depths):
        return self.line(depths)


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return torch.device("cpu")


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def inner(model):
    return model.module if isinstance(model, DDP) else model


def show(model, device):
    if not is_first():
        return
    sample = torch.zeros(2, 16, device=device)
    inner(model).eval()
    with torch.no_grad():
        print("scores of still water:", inner(model)(sample).tolist())
    inner(model).train()


def train_epoch(model, loader, optimizer, device):
    for depths, labels in loader:
        optimizer.zero_grad()
        outputs = model(depths.to(device))
        nn.functional.cross_entropy(outputs, labels.to(device)).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--weights", default="")
    args = parser.parse_args()

    device = setup()
    torch.manual_seed(0)
    bare = Sounder().to(device)
    if is_first():
        print(bare(torch.zeros(4, 16, device=device)).shape)
    model = DDP(bare)
    probe = DDP(Probe().to(device))
    first = copy.deepcopy(model.module)
    dataset = Ponds(512)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 32, sampler=sampler, drop_last=True)
    held_out = DataLoader(Ponds(128, first=10_000), 64)
    own_share = DataLoader(Ponds(128, first=20_000 + 128 * dist.get_rank()), 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    judge = Judge(model.module, held_out, device)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, device)
        if is_first():
            score, is_best = judge.judge()
            before = mean_loss(first, held_out, device)
            print(f"epoch {epoch}: {score:.4f} (untrained {before:.4f})")
            mean_loss(probe, held_out, device)
            if is_best and args.weights:
                torch.save(model.module.state_dict(), args.weights)
        table = confusion(model, own_share, device, KINDS)
        dist.all_reduce(table)
        if is_first():
            print("right:", int(table.trace().item()), "of", int(table.sum().item()))
    show(model, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
