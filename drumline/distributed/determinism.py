"""What decides the bits of a result: seeds, kernels, threads and the machine.

One seed per run. Initial weights are the same on every rank; randomness inside the model (dropout) is each rank's own,
or in the elastic mode each shard's; the randomness of a sample belongs to the sample (data/draws.py), whichever rank
loads it.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from drumline.errors import TrainingError

MODEL_STREAM, RANK_STREAM, SHARD_STREAM = 1, 2, 3
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What cuBLAS wants in the environment before it is first used, to give the same bits each time."""


def seed_shared(seed: int) -> None:
    """Seed all generators the same way on every rank: what is built next is the same everywhere."""
    _seed_generators(np.random.SeedSequence([seed, MODEL_STREAM]))


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators differently on every rank: what is drawn next is this rank's own."""
    _seed_generators(np.random.SeedSequence([seed, RANK_STREAM, rank]))


def seed_shard(seed: int, *, epoch: int, start: int, shard: int) -> None:
    """Seed all generators for one shard of the global batch that starts there: what is drawn next is the same on
    whichever rank computes it."""
    _seed_generators(np.random.SeedSequence([seed, SHARD_STREAM, epoch, start, shard]))


def _seed_generators(sequence: np.random.SeedSequence) -> None:
    torch_seed, python_seed, numpy_seed = (int(word) for word in sequence.generate_state(3, np.uint64))
    torch.manual_seed(torch_seed & (2**63 - 1))
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time, and refuse operations that have none."""
    torch.use_deterministic_algorithms(True)
    # The search for the fastest kernel goes by the clock, so it does not find the same one each time.
    torch.backends.cudnn.benchmark = False
    # A help for debugging that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_refused_kernels() -> Iterator[None]:
    """What to do when torch refuses an operation that would not give the same bits each time."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise TrainingError(
            f"{str(error).split(',', 1)[0]} on this device, and only such ones are allowed here",
            next_step="use another operation in its place, or leave --train.deterministic (and --train.exact elastic) "
            "off: then a resumed run is the same run, but for the last bits",
        ) from error


def platform_facts(device: torch.device) -> dict[str, Any]:
    """What the last bit of a result depends on. The same run on another machine is the same run, but for rounding."""
    if device.type == "cuda":
        hardware: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "CUDA version": torch.version.cuda}
    else:
        hardware = {
            "device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "number of threads": torch.get_num_threads(),
        }
    return {"torch version": torch.__version__, **hardware}
