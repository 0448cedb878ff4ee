"""What decides the bits of a result: seeds, kernels, threads and the machine.

A run has one seed. Initial weights are the same on every rank; random numbers inside the model
(dropout) differ by rank, or in the elastic mode by shard; those of a sample depend only on the
sample (data/sharding.py), on any rank.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from drumline.base.errors import TrainingError

# One number for each use of the seed, so that no two draw the same numbers.
MODEL_SEEDS = 1
RANK_SEEDS = 2
SHARD_SEEDS = 3
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""The variable that cuBLAS needs before its first use, to give the same bits each time."""


def seed_shared(seed: int) -> None:
    """Seed all generators the same way on every rank: what is built next is the same on all."""
    _seed_generators(np.random.SeedSequence([seed, MODEL_SEEDS]))


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators differently on every rank."""
    _seed_generators(np.random.SeedSequence([seed, RANK_SEEDS, rank]))


def seed_shard(seed: int, *, epoch: int, start: int, shard: int) -> None:
    """Seed all generators for one shard of the global batch that starts there: the next random
    numbers are the same on any rank that computes it."""
    _seed_generators(np.random.SeedSequence([seed, SHARD_SEEDS, epoch, start, shard]))


def _seed_generators(sequence: np.random.SeedSequence) -> None:
    torch_seed, python_seed, numpy_seed = (
        int(word) for word in sequence.generate_state(3, np.uint64)
    )
    torch.manual_seed(torch_seed & (2**63 - 1))
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time, and refuse operations that have
    none."""
    torch.use_deterministic_algorithms(True)
    # The search for the fastest kernel measures times, so it does not choose the same one each
    # time.
    torch.backends.cudnn.benchmark = False
    # A debugging aid that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_refused_kernels() -> Iterator[None]:
    """Adds what to do when torch refuses an operation that has no deterministic kernel."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise TrainingError(
            f"{str(error).split(',', 1)[0]} on this device, and only deterministic ones are allowed here",
            next_step="use another operation, or leave --train.deterministic (and --train.exact elastic) "
            "off: then a resumed run may differ in the last bits",
        ) from error


def platform_facts(device: torch.device) -> dict[str, Any]:
    """What the last bit of a result depends on. On another machine a run may differ by rounding."""
    if device.type == "cuda":
        hardware: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device),
            "CUDA version": torch.version.cuda,
        }
    else:
        hardware = {
            "device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "number of threads": torch.get_num_threads(),
        }
    return {"torch version": torch.__version__, **hardware}
