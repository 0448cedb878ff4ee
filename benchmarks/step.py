"""The engine's step against a hand-written loop: what sampling, loading, the schedule and metering cost.

make bench        (or: python benchmarks/step.py --ranks 1,2 --rounds 15)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from side_by_side import SAMPLES, InMemory, compare, engine_steps, task_in_memory
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from drumline.config.schema import Config
from drumline.distributed.seeds import seed_shared
from drumline.manager import DDPManager


def hand_written_steps(ddp: DDPManager, config: Config) -> Iterator[None]:
    """What a careful person writes with plain torch: samples in memory, a shuffled index, DDP, a fused optimizer."""
    seed_shared(0)
    task = task_in_memory(config)
    data: InMemory = task.train_data()
    batch_size = (config.train.batch_size or 0) // ddp.world_size
    model: nn.Module = task.model()
    if ddp.backend is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = plain_optimizer(model, config)
    while True:
        order = torch.randperm(SAMPLES)[ddp.rank :: ddp.world_size]
        for chosen in order.split(batch_size):
            optimizer.zero_grad(set_to_none=True)
            scores = model(data.inputs[chosen])
            functional.cross_entropy(scores.flatten(0, -2), data.targets[chosen].flatten()).backward()
            if config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
            optimizer.step()
            yield


def plain_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)


if __name__ == "__main__":
    compare(__doc__, first=("by hand", hand_written_steps), second=("ours", engine_steps), ranks="1,2")
