"""What ranks find out once they have met: collectives, a step under DDP, bandwidth; each within its time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from drumline.doctor.collectives.ddp_step import ddp_faults
from drumline.doctor.collectives.exchange import LARGE, SMALL, Exchange, Trial, trials
from drumline.doctor.collectives.timekeeper import Timekeeper
from drumline.manager import DDPManager

ROUNDS = 5
LARGE_ON_GPUS = 16 * LARGE
VALUE_FIX = "test memory and links of that host (nvidia-smi -q -d ECC; dmesg), and leave it out until then"


def check_everything(
    ddp: DDPManager, timekeeper: Timekeeper, exchange: Exchange, wrong: Callable[[str, str], None]
) -> dict[str, float]:
    """Collective: each fault goes to `wrong`, with its fix; returns what was measured."""
    for trial in trials(exchange, rank=ddp.rank, world_size=ddp.world_size):
        with timekeeper.phase(trial.name):
            if fault := _fault(trial, exchange):
                wrong(fault, VALUE_FIX)
    with timekeeper.phase("a step under DDP"):
        for fault in ddp_faults(ddp):
            wrong(fault, VALUE_FIX)
    with timekeeper.phase("the measurement of bandwidth"):
        numbers = _measured(exchange, ddp.world_size)
    with timekeeper.phase("the last barrier"):
        ddp.barrier()
        exchange.wait()
    return numbers


def _fault(trial: Trial, exchange: Exchange) -> str | None:
    """Collective: what came out wrong; nothing, of a collective that the backend does not have."""
    try:
        return trial.fault(exchange)
    except RuntimeError as error:
        if trial.is_needed or "support" not in str(error):
            raise
        return None


def _measured(exchange: Exchange, world_size: int) -> dict[str, float]:
    """Collective: what an all_reduce moves over the slowest link, counted as nccl-tests do, and how long the smallest
    one takes."""
    size = LARGE_ON_GPUS if exchange.device.type == "cuda" else LARGE
    tensor = torch.ones(size, device=exchange.device)
    seconds = _seconds(exchange, tensor)
    moved = tensor.nbytes * 2 * (world_size - 1) / world_size
    return {
        "all_reduce_bytes": tensor.nbytes,
        "all_reduce_gb_per_s": moved / seconds / 1e9,
        "all_reduce_latency_us": _seconds(exchange, torch.ones(SMALL, device=exchange.device)) * 1e6,
    }


def _seconds(exchange: Exchange, tensor: torch.Tensor) -> float:
    exchange.all_reduce(tensor, dist.ReduceOp.MAX)  # connections and buffers are made at the first one
    exchange.wait()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        exchange.all_reduce(tensor, dist.ReduceOp.MAX)
    exchange.wait()
    return (time.perf_counter() - start) / ROUNDS
