"""Which device a rank computes on, and which backend its collectives use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drumline.errors import PreflightError


def choose_device(wanted: str, *, local_rank: int) -> torch.device:
    """The rank's own device; a GPU is made current at once, before anything can touch GPU 0 by default."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise PreflightError(
            "dist.device is 'cuda', but torch sees no GPU here",
            next_step="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --dist.device cpu",
        )
    # `srun --gpus-per-task=1` shows each rank its own GPU and no other; the rendezvous checks that they differ.
    index = 0 if num_gpus == 1 else local_rank
    if index >= num_gpus:
        raise PreflightError(
            f"local rank {local_rank} has no GPU of its own: this host has {num_gpus}",
            next_step=f"start at most {num_gpus} ranks on this host, or use --dist.device cpu",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def nccl_gpu(device: torch.device, environment: Mapping[str, str]) -> str | None:
    """What NCCL tells ranks apart by, so that no two may share it: the GPU's UUID, and the host that NCCL_HOSTID names.
    Ranks with a host of their own each may share a GPU, which tests on one GPU need."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    host = environment.get("NCCL_HOSTID")
    return uuid if host is None else f"{uuid} (NCCL_HOSTID {host})"


def choose_backend(wanted: str, *, device: torch.device) -> str:
    """NCCL between GPUs, gloo between CPUs, unless set."""
    backend = wanted if wanted != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise PreflightError(
            "dist.backend is 'nccl', but this rank computes on the CPU",
            next_step="use --dist.backend gloo, or --dist.device cuda on a machine with GPUs",
        )
    return backend
