"""DDP's buckets at another size: how many bytes each has, when it is ready, and what its all-reduce
would cost. The advice and the simulation both use it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression
from typing import NamedTuple

from drumline.base.text import MIB
from drumline.runs.profile_result import Bucket, ProfileResult

CAPS_MB = (25.0, 1.0, 5.0, 10.0, 50.0, 100.0, 200.0)
"""The sizes that are compared; DDP's default first, since it is taken where others bring no
more."""
MIN_SPREAD = 2.0
LARGE = 1 << 20
FIRST_BYTES = 1 << 20
"""DDP's first bucket, where no size is given."""
SLOWEST_LINK = 12.5e6
"""Bytes per second: no slower link is assumed where the bandwidth is not known."""


@dataclass(frozen=True, kw_only=True)
class ReadyGradients:
    """A gradient, or a bucket of them, and what a rank has done in a step until it is ready."""

    num_bytes: int
    compute_s: float
    host_s: float = 0.0
    """Python, launches and host synchronisation."""

    @property
    def ready_s(self) -> float:
        """When it is ready, if the rank waits for nothing."""
        return self.compute_s + self.host_s


def filled(
    sizes: Sequence[int],
    cap_bytes: float,
    *,
    first_bytes: float | None = None,
) -> list[range]:
    """Which tensors DDP puts into each bucket: in this order, and never a part of one, until a
    bucket has reached the cap. `first_bytes`: the cap of the first bucket."""
    buckets: list[range] = []
    first = 0
    num_bytes = 0
    for number, size in enumerate(sizes):
        num_bytes += size
        cap = first_bytes if first_bytes is not None and not buckets else cap_bytes
        if num_bytes >= cap:
            buckets.append(range(first, number + 1))
            first = number + 1
            num_bytes = 0

    return [*buckets, range(first, len(sizes))] if first < len(sizes) else buckets


def planned(tensors: Sequence[ReadyGradients], cap_bytes: float) -> tuple[ReadyGradients, ...]:
    """The buckets of these tensors, where `cap_bytes` is given to DDP: then the first is as large
    as the others. A bucket is ready with the last of its tensors."""
    plan = []
    for numbers in filled([tensor.num_bytes for tensor in tensors], int(cap_bytes)):
        bucket = [tensors[number] for number in numbers]
        last = max(bucket, key=lambda tensor: tensor.ready_s)
        plan.append(replace(last, num_bytes=sum(tensor.num_bytes for tensor in bucket)))
    return tuple(plan)


@dataclass(frozen=True, kw_only=True)
class ReduceCost:
    """The time of one all-reduce: `latency_s + num_bytes * s_per_byte`."""

    latency_s: float
    s_per_byte: float

    def __call__(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes * self.s_per_byte


def fit_costs(
    buckets: Sequence[Bucket],
    *,
    network_bytes_per_s: float | None,
    world_size: int,
) -> tuple[ReduceCost, ...]:
    """The cost of an all-reduce: one where the buckets' sizes differ enough to tell latency and
    bandwidth apart, or where `doctor` has measured the bandwidth. Otherwise two, the likely one
    first: small ones are latency, unless the link is very slow, and large ones are bytes."""
    sizes = [bucket.num_bytes for bucket in buckets]
    times_s = [bucket.reduce_s for bucket in buckets]
    mean_size = fmean(sizes)
    mean_s = fmean(times_s)

    if max(sizes) >= MIN_SPREAD * min(sizes):
        slope = linear_regression(sizes, times_s).slope
        # neither term of the sum is negative
        slope = min(max(slope, 0.0), mean_s / mean_size)
        if max(sizes) < LARGE:  # their times differ for other reasons, too
            slope = min(slope, 2 * (world_size - 1) / world_size / SLOWEST_LINK)
        return (ReduceCost(latency_s=mean_s - slope * mean_size, s_per_byte=slope),)

    all_of_it = mean_s / mean_size
    speeds = [network_bytes_per_s] if network_bytes_per_s else [math.inf, SLOWEST_LINK]
    slopes = [min(2 * (world_size - 1) / world_size / speed, all_of_it) for speed in speeds]
    if mean_size >= LARGE and not network_bytes_per_s:
        slopes = [all_of_it, all_of_it / 2]
    return tuple(
        ReduceCost(latency_s=mean_s - slope * mean_size, s_per_byte=slope) for slope in slopes
    )


def exposed_s(queue: Sequence[tuple[float, float]]) -> float:
    """How long all-reduces continue after the last gradient: each has a duration and a time when it
    is ready, and one runs after the other."""
    end = 0.0
    for seconds, ready in queue:
        end = max(end, ready) + seconds
    return max(0.0, end - max(ready for _, ready in queue))


class CapPlan(NamedTuple):
    """What buckets of a size would cost."""

    cap_mb: float
    exposed_s: float
    reduce_s: float
    """The time of all their all-reduces."""


def exposed_by_cap(
    tensors: Sequence[ReadyGradients],
    sent_part: float,
    cost: Callable[[float], float],
) -> Iterator[CapPlan]:
    """For each of CAPS_MB. `sent_part`: the bytes that are sent for a byte of gradients, which the
    size of a bucket counts."""
    for cap in CAPS_MB:
        plan = planned(tensors, cap * MIB)
        queue = [(cost(bucket.num_bytes * sent_part), bucket.ready_s) for bucket in plan]
        yield CapPlan(cap, exposed_s(queue), sum(seconds for seconds, _ in queue))


def backward_gradients(result: ProfileResult, sent_part: float) -> list[ReadyGradients]:
    """The gradients in the order in which they are ready, by the time of the backward pass. Where
    their sizes are not known, a bucket is one of them: such buckets can be joined, not split."""
    if result.tensors:
        return [
            ReadyGradients(num_bytes=tensor.num_bytes, compute_s=tensor.backward_s)
            for tensor in result.tensors
        ]

    return [
        ReadyGradients(num_bytes=round(bucket.num_bytes / sent_part), compute_s=bucket.backward_s)
        for bucket in result.buckets
    ]
