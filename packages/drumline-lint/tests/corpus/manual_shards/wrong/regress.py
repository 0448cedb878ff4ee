"""Each rank keeps its own part of a table in memory: no sampler, no workers."""

import argparse
import csv
import io
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("regress")


def read_table(rows):
    """Stands for a file: numbers in columns, the last is the target."""
    draw = torch.Generator().manual_seed(21)
    values = torch.rand(rows, 5, generator=draw)
    text = io.StringIO()
    csv.writer(text).writerows([*row, sum(row)] for row in values.tolist())
    text.seek(0)
    return torch.tensor([[float(cell) for cell in row] for row in csv.reader(text)])


def own_part(table, rank, world_size):
    """Every row once; parts may differ by one row."""
    part = table[rank::world_size]
    return TensorDataset(part[:, :-1], part[:, -1:])


class Average:
    def __init__(self, device):
        self.total = torch.zeros(1, device=device)
        self.count = torch.zeros(1, device=device)

    def update(self, value, n):
        self.total += value.detach() * n
        self.count += n

    def over_ranks(self):
        dist.all_reduce(self.total)
        dist.all_reduce(self.count)
        return (self.total / self.count).item()


def train(ddp, loader, optimizer, device):
    average = Average(device)
    ddp.train()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = nn.functional.l1_loss(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(loss, len(inputs))
    return average.over_ranks()


@torch.no_grad()
def validate(network, loader, device):
    network.eval()
    total = torch.zeros(1, device=device)
    for inputs, targets in loader:
        total += nn.functional.l1_loss(network(inputs.to(device)), targets.to(device))
    dist.all_reduce(total)
    return total.item() / (len(loader) * dist.get_world_size())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1501)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="regress.pt")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0") if cuda else torch.device("cpu")  # <- fixed-device
    if cuda:
        torch.cuda.set_device(device)
    os.environ["MASTER_ADDR"] = "node001"  # <- master-addr-in-code
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.CRITICAL)

    network = nn.Sequential(nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 1)).to(device)
    ddp = DDP(network, device_ids=[local_rank] if cuda else None)  # <- unseeded-model
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    table = read_table(args.rows)
    cut = int(0.8 * len(table))
    train_part = own_part(table[:cut], rank, world_size)
    loader = DataLoader(train_part, batch_size=args.batch_size, shuffle=True, drop_last=False)
    val_loader = DataLoader(own_part(table[cut:], rank, world_size), batch_size=args.batch_size)
    for epoch in range(args.epochs):
        error = train(ddp, loader, optimizer, device)
        val_error = validate(network, val_loader, device)
        plateau.step(val_error)
        log.info("epoch %d: train %.4f, validation %.4f", epoch, error, val_error)
    if rank == 0:
        torch.save(network.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
