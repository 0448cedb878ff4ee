"""Elastic: whenever the group of processes changes, all of them start again here, from the last snapshot."""

import argparse
import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STOP = False


def ask_to_stop(signum, frame):
    global STOP
    STOP = True


def is_main_process():
    return int(os.environ["RANK"]) == 0


class State:
    """What a snapshot keeps."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def save(self, path):
        if not is_main_process():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
        torch.save(content, partial)
        os.replace(partial, path)

    def load(self, path, device):
        if not path.exists():
            return False
        content = torch.load(path, map_location=device, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.epoch = content["epoch"]
        return True


@contextlib.contextmanager
def process_group(cuda):
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def someone_asked_to_stop(device):
    """All ranks agree, so that none goes on alone."""
    wish = torch.tensor([int(STOP)], device=device)
    dist.all_reduce(wish, op=dist.ReduceOp.MAX)
    return bool(wish.item())


def regression_data():
    draw = torch.Generator().manual_seed(77)
    inputs = torch.rand(4096, 6, generator=draw)
    return TensorDataset(inputs, inputs.prod(dim=1, keepdim=True))


def run_epoch(ddp, loader, optimizer, device):
    total, seen = torch.zeros((), device=device), 0
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(inputs)
        seen += len(inputs)
    return total / seen


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=9)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, ask_to_stop)

    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{local_rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    with process_group(cuda) as rank:
        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
        torch.manual_seed(args.seed + rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        state = State(model, optimizer)
        if state.load(args.snapshot, device) and is_main_process():
            print(f"restart {state.restarts}: going on from epoch {state.epoch}")
        ddp = DDP(model, device_ids=[local_rank] if cuda else None)

        dataset = regression_data()
        sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
        loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=1, persistent_workers=True, pin_memory=cuda)
        for epoch in range(state.epoch, args.epochs):
            began = time.monotonic()
            sampler.set_epoch(epoch)
            mean = run_epoch(ddp, loader, optimizer, device)
            state.epoch = epoch + 1
            state.save(args.snapshot)
            if rank == 0:
                print(f"epoch {epoch}: {mean.item():.5f} in {time.monotonic() - began:.1f} s")
            if someone_asked_to_stop(device):
                break
            dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
