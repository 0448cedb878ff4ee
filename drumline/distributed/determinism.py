"""What else decides the bits of a result, besides the numbers that go in: the kernels, the threads, the machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from drumline.errors import TrainingError

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What cuBLAS wants in the environment before it is first used, to give the same bits each time."""


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time, and refuse operations that have none."""
    torch.use_deterministic_algorithms(True)
    # The search for the fastest kernel goes by the clock, so it does not find the same one each time.
    torch.backends.cudnn.benchmark = False
    # A help for debugging that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def told_of_refused_kernels() -> Iterator[None]:
    """Say what to do when torch refuses an operation that would not give the same bits each time."""
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


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What the last bit of a result depends on. The same run on another machine is the same run, but for rounding."""
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
