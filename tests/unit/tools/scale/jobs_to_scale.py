"""Profiles and networks for tests of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.runs.profile_result import PARTS, Bucket, GradientTensor, ProfileResult, RankSteps
from drumline.tools.scale.network_model import INSIDE, Link, Network

MIB = 1 << 20


def make_profile(
    *,
    compute_s: Sequence[float] = (1.0,),
    buckets: Sequence[tuple[int, float]] = ((MIB, 0.5), (MIB, 0.9)),
    tensors: Sequence[tuple[int, float]] = (),
    parts_s: dict[str, float] | None = None,
    host_s: Sequence[float] = (),
    cpu_wait_s: float | None = None,
    **values: Any,
) -> ProfileResult:
    """A job whose backward pass begins at 0.4 s; a bucket or a tensor is (bytes, ready)."""
    parts = {
        **dict.fromkeys(PARTS, 0.0),
        "compute": sum(compute_s) / len(compute_s),
        **(parts_s or {}),
    }
    rank = RankSteps(
        rank=0,
        host="a",
        step_s=tuple(compute_s),
        compute_s=tuple(compute_s),
        parts_s=parts,
        hidden_communication_s=0.0,
        critical_steps=0,
        host_s=tuple(host_s),
        cpu_wait_s=cpu_wait_s,
    )
    fields: dict[str, Any] = {
        "task": "digits",
        "world_size": 2,
        "num_nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "first_step": 2,
        "num_steps": len(compute_s),
        "batch_size": 64,
        "accumulate": 1,
        "precision": None,
        "bucket_cap_mb": 25.0,
        "settings": {},
        "step_s": sum(parts.values()),
        "parts_s": parts,
        "hidden_communication_s": 0.0,
        "ranks": (rank,),
        "buckets": tuple(
            Bucket(num_bytes=size, ready_s=ready, backward_s=ready - 0.4, reduce_s=0.1)
            for size, ready in buckets
        ),
        "tensors": tuple(
            GradientTensor(num_bytes=size, ready_s=ready, backward_s=ready - 0.4, host_s=0.0)
            for size, ready in tensors
        ),
        "other_collectives_s": 0.0,
        "other_collectives": 0.0,
        "kernels": (),
        "syncs": (),
        "network_bytes_per_s": None,
    }
    return ProfileResult(**{**fields, **values})


def make_network(
    bytes_per_s: float = MIB, latency_s: float = 0.0, *, backend: str = "gloo"
) -> Network:
    link = Link(name="test", bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Network(
        backend=backend, between=link, inside=INSIDE["nvlink4" if backend == "nccl" else "loopback"]
    )
