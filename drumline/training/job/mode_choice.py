"""`--dist.mode auto`: the cheapest mode whose memory plan fits on the GPUs of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from drumline.base.errors import UsageError
from drumline.base.text import memory_size, plural
from drumline.checkpoint.state import keeping_rng
from drumline.config.schema import Config
from drumline.rank.collectives import broadcast_json, gather_json
from drumline.training.manager import RunManager
from drumline.training.memory.memory_plan import plan_memory
from drumline.training.tasks.base import Task


def settle_mode(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    note: Callable[[str], None] = lambda message: None,
) -> Config:
    """Collective: the same settings with a mode in place of `auto`. Rank 0 makes the plan; `note`
    gets its reason."""
    if config.dist.mode != "auto":
        return config
    mode: Any
    if ddp.world_size == 1 or ddp.device.type != "cuda":
        mode = "ddp"
        reason = (
            "one process shards nothing"
            if ddp.world_size == 1
            else "memory is planned for GPUs only"
        )
    else:
        memory = _smallest_memory(ddp)
        chosen = _choose(config, task_class, ddp, memory) if ddp.is_main_process() else None
        mode, reason = broadcast_json(chosen)
        if mode is None:  # on every rank, so that none waits for the others
            raise UsageError(
                f"--dist.mode auto: {reason}", next_step="give ddp, zero1, fsdp or hsdp"
            )
    if ddp.is_main_process():
        note(f"dist.mode auto is {mode}: {reason}")
    return replace(config, dist=replace(config.dist, mode=mode))


def _smallest_memory(ddp: RunManager) -> int:
    """Collective: what the rank with the least has on its GPU, which ranks of one host may
    share."""
    this_gpu = [
        ddp.host,
        ddp.device.index,
        torch.cuda.get_device_properties(ddp.device).total_memory,
    ]
    everyone = gather_json(this_gpu)
    sharing = Counter((host, index) for host, index, _ in everyone)
    return min(int(total) // sharing[host, index] for host, index, total in everyone)


def _choose(
    config: Config, task_class: type[Task], ddp: RunManager, memory: int
) -> tuple[str | None, str]:
    """The mode and its reason; None and the reason why there is no plan."""
    try:
        with keeping_rng(ddp.device):
            return choose_mode(
                config, task_class(config), ddp.world_size, ddp.local_world_size, memory
            )
    except UsageError as error:
        return None, error.what
    except (
        Exception
    ) as error:  # the task's own code, on tensors without data; the other ranks wait for the answer
        return None, f"{type(error).__name__}: {error}"


def choose_mode(
    config: Config, task: Task, world_size: int, ranks_per_node: int, memory: int
) -> tuple[str, str]:
    """The cheapest mode that fits in so many bytes, otherwise the one that needs least; and the
    reason."""
    plan = plan_memory(config, task, worlds=[world_size], ranks_per_node=ranks_per_node)
    if world_size in plan.impossible:
        raise UsageError(plan.impossible[world_size])
    fitting = plan.cheapest(world_size, memory)
    least = fitting or min(plan.ranks, key=lambda rank_memory: rank_memory.total)
    fit = "the cheapest that fits" if fitting else "which needs least, but may not fit"
    need = memory_size(least.total)
    ranks = plural(world_size, "rank")
    return (
        least.mode,
        f"{fit} on {ranks}; it needs {need} of {memory_size(memory)} at its peak (drumline plan)",
    )
