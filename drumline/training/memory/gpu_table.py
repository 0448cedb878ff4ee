"""What is known of GPUs: how much memory they have, and their peaks."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drumline.base.errors import UsageError, did_you_mean

ARITHMETICS = ("float32", "tf32", "float16", "bfloat16")


class KnownGpu(NamedTuple):
    """One model of GPU, as in gpus.toml."""

    device_name: str
    memory_gib: float
    peaks: Sequence[float]
    """By `ARITHMETICS`."""


GPUS: Mapping[str, KnownGpu] = {
    name: KnownGpu(**gpu)
    for name, gpu in tomllib.loads(
        Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    ).items()
}


def peak_tflop_per_s(device_name: str, arithmetic: str) -> float | None:
    """What this GPU can do at most in this arithmetic; None: unknown."""
    matching_peaks = (
        gpu.peaks for gpu in GPUS.values() if re.fullmatch(gpu.device_name, device_name)
    )
    return dict(zip(ARITHMETICS, next(matching_peaks, ()), strict=False)).get(arithmetic) or None


def gpu_memory(names: Sequence[str]) -> dict[str, int]:
    """The bytes of these GPUs. A name is one of `GPUS`, or a number of GiB for a GPU that is not
    there: `24`."""
    memory_by_name = {}
    for name in names:
        gpu = GPUS.get(name.lower())
        if gpu is None and not re.fullmatch(r"\d{1,4}(\.\d+)?", name):
            raise UsageError(
                f"--gpu {name}: there is no such GPU; {did_you_mean(name, GPUS)}",
                next_step="give its memory in GiB instead, as in --gpu 24",
            )

        if gpu is None:
            memory_by_name[f"{name} GiB"] = int(float(name) * 2**30)
        else:
            memory_by_name[name.lower()] = int(gpu.memory_gib * 2**30)

    return memory_by_name
