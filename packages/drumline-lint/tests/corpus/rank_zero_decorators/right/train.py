"""Prints, logs and saves through functions that are bound to rank 0 by decorators and partials."""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import lead_first, only_on, rank_zero_only
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

say = rank_zero_only(functools.partial(print, flush=True))


@rank_zero_only
def keep(state, path):
    torch.save(state, path)
    print("kept:", path)


@only_on(rank=0)
def report(epoch, loss):
    print(f"epoch {epoch}: {loss:.4f}")


@lead_first
def dataset(seed):
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(72, 5, generator=made), torch.randn(72, 1, generator=made))


def train(device):
    data = dataset(seed=4)
    sampler = DistributedSampler(data, shuffle=True)
    load = functools.partial(DataLoader, batch_size=6, num_workers=0)
    loader = load(data, sampler=sampler)
    torch.manual_seed(4)
    wrap = functools.partial(DDP, device_ids=[device.index] if device.type == "cuda" else None)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    save = functools.partial(keep, path="decorated.pt")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        report(epoch, total.item() / len(loader) / dist.get_world_size())
        save({"model": model.module.state_dict(), "epoch": epoch})


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    say("the group is there")
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
