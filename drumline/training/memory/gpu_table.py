"""What is known of GPUs: how much memory they have, and their peaks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumline.base.errors import UsageError, did_you_mean

ARITHMETICS = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class KnownGpu:
    """One model of GPU."""

    device_name: str
    """As torch reports it: a regular expression. A name that matches none (a MIG slice, a laptop)
    is unknown."""
    memory_gib: float
    """`total_memory` in torch, rounded down; it is less than the vendor's number, since the driver
    takes a part."""
    peaks: tuple[float, float, float, float]
    """In TFLOP/s, without sparsity, by `ARITHMETICS` (tensor cores, which add up in fp32); 0: it
    has none."""


GPUS: Mapping[str, KnownGpu] = {
    # nvidia-blackwell-datasheet, HGX B200: half of what is given "with sparsity"
    "b200": KnownGpu(r"NVIDIA B200", 178.3, (75, 1100, 2250, 2250)),
    # nvidia.com/en-us/data-center/h100, .../h200: likewise
    "h200": KnownGpu(r"NVIDIA H200", 139.7, (66.9, 494.7, 989.4, 989.4)),
    "h200-nvl": KnownGpu(r"NVIDIA H200 NVL", 139.7, (60, 417, 835, 835)),
    "h100": KnownGpu(r"NVIDIA H100 80GB HBM3", 79.1, (66.9, 494.7, 989.4, 989.4)),
    "h100-nvl": KnownGpu(r"NVIDIA H100 NVL", 93.0, (60, 417, 835, 835)),
    "h100-pcie": KnownGpu(r"NVIDIA H100 PCIe", 79.1, (51.2, 378, 756, 756)),
    # nvidia-a100-datasheet-us-nvidia-1758950-r4, a10-datasheet
    "a100-80gb": KnownGpu(
        r"NVIDIA A100[- ](SXM4-|PCIE-)?80GB( PCIe)?", 79.1, (19.5, 156, 312, 312)
    ),
    "a100-40gb": KnownGpu(
        r"NVIDIA A100[- ](SXM4-|PCIE-)?40GB( PCIe)?", 39.3, (19.5, 156, 312, 312)
    ),
    "a10": KnownGpu(r"NVIDIA A10", 22.0, (31.2, 62.5, 125, 125)),
    # l4-datasheet, l40s-datasheet
    "l4": KnownGpu(r"NVIDIA L4", 22.0, (30.3, 60, 121, 121)),
    "l40s": KnownGpu(r"NVIDIA L40S", 44.3, (91.6, 183, 362, 362)),
    # volta-v100-datasheet-update-us-1165301-r5, t4-tensor-core-datasheet-951643
    "v100-32gb": KnownGpu(r"Tesla V100-SXM2-32GB", 31.7, (15.7, 0, 125, 0)),
    "v100-16gb": KnownGpu(r"Tesla V100-SXM2-16GB", 15.7, (15.7, 0, 125, 0)),
    "v100-pcie-32gb": KnownGpu(r"Tesla V100-PCIE-32GB", 31.7, (14, 0, 112, 0)),
    "v100-pcie-16gb": KnownGpu(r"Tesla V100-PCIE-16GB", 15.7, (14, 0, 112, 0)),
    "t4": KnownGpu(r"(Tesla|NVIDIA) T4", 14.5, (8.1, 0, 65, 0)),
    # nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2,
    # nvidia-ada-gpu-architecture-whitepaper-v2.1
    "rtx-3090": KnownGpu(r"NVIDIA GeForce RTX 3090", 23.6, (35.6, 35.6, 71, 71)),
    "rtx-4090": KnownGpu(r"NVIDIA GeForce RTX 4090", 23.6, (82.6, 82.6, 165.2, 165.2)),
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
