"""A tiny classifier whose settings are one object that is handed on, as Hydra does it."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Runtime:
    def __init__(self, env):
        self.rank = int(env.get("RANK", "0"))
        self.local_rank = int(env.get("LOCAL_RANK", "0"))
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"

    @property
    def device(self):
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def speaks(self):
        return self.rank == 0


@dataclass
class Config:
    seed: int = 7
    epochs: int = 2
    out: str = "config_object.pt"
    runtime: Runtime | None = None

    def __post_init__(self):
        self.runtime = Runtime(os.environ)


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int = 0

    def save(self, path):
        """Who calls sees to it that one rank does."""
        content = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**content, "epoch": self.epoch}, path)


def make_state(cfg):
    torch.manual_seed(cfg.seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(cfg.runtime.device)
    ids = [cfg.runtime.local_rank] if cfg.runtime.device.type == "cuda" else None
    model = DistributedDataParallel(net, device_ids=ids)
    return State(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(cfg):
    state = make_state(cfg)
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, pin_memory=cfg.runtime.device.type == "cuda")
    for state.epoch in range(cfg.epochs):
        sampler.set_epoch(state.epoch)
        total = torch.zeros((), device=cfg.runtime.device)
        for x, y in loader:
            x, y = (one.to(cfg.runtime.device, non_blocking=True) for one in (x, y))
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(x), y)
            loss.backward()
            state.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if cfg.runtime.speaks:
            print(f"epoch {state.epoch}: {total.item() / len(loader) / dist.get_world_size():.3f}")
            state.save(cfg.out)
    dist.barrier()


if __name__ == "__main__":
    config = Config()
    dist.init_process_group(config.runtime.backend, timeout=timedelta(minutes=5))
    try:
        run(config)
    finally:
        dist.destroy_process_group()
