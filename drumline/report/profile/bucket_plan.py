"""DDP's buckets at another size: how many bytes each has, when it is ready, and what its all-reduce
would cost. The advice and the simulation both use it. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from drumline.base.text import MIB
from drumline.runs.profile_result import Bucket

CAPS_MB = (25.0, 1.0, 5.0, 10.0, 50.0, 100.0, 200.0)
"""The sizes that are compared; DDP's default first, since it is taken where others bring no
more."""
MIN_SPREAD = 2.0
LARGE = 1 << 20
SLOWEST_LINK = 12.5e6
"""Bytes per second: no slower link is assumed where the bandwidth is not known."""


@dataclass(frozen=True, kw_only=True)
class ReadyBucket:
    """The bytes that are sent for a bucket of gradients, and when they are ready."""

    num_bytes: int
    ready_s: float


def planned(
    buckets: Sequence[ReadyBucket], cap_bytes: float, *, begin_s: float
) -> tuple[ReadyBucket, ...]:
    """The same gradients in buckets of `cap_bytes`. A backward pass that begins at `begin_s` fills
    one after the other in the order in which gradients are ready, so the rest is in the last one.
    The first is as large as the others: DDP makes it smaller (1 MiB) only where no size is
    given."""
    measured_bytes = [0, *accumulate(bucket.num_bytes for bucket in buckets)]
    times = [begin_s, *(bucket.ready_s for bucket in buckets)]
    size = max(1, round(cap_bytes))
    ends = [*range(size, measured_bytes[-1], size), measured_bytes[-1]]
    plan = []
    for first, last in pairwise([0, *ends]):
        # Its time is between the measured ones.
        place = max(1, bisect_left(measured_bytes, last))
        below, above = measured_bytes[place - 1 : place + 1]
        part = (last - below) / (above - below)
        ready_s = times[place - 1] + part * (times[place] - times[place - 1])
        plan.append(ReadyBucket(num_bytes=last - first, ready_s=ready_s))
    return tuple(plan)


@dataclass(frozen=True, kw_only=True)
class ReduceCost:
    """The time of one all-reduce: `latency_s + num_bytes * s_per_byte`."""

    latency_s: float
    s_per_byte: float

    def __call__(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes * self.s_per_byte


def fit_costs(
    buckets: Sequence[Bucket], *, network_bytes_per_s: float | None, world_size: int
) -> tuple[ReduceCost, ...]:
    """The cost of an all-reduce: one where the buckets' sizes differ enough to tell latency and
    bandwidth apart, or where `doctor` has measured the bandwidth. Otherwise two, the likely one
    first: small ones are latency, unless the link is very slow, and large ones are bytes."""
    sizes = [bucket.num_bytes for bucket in buckets]
    mean_size = sum(sizes) / len(sizes)
    mean_s = sum(bucket.reduce_s for bucket in buckets) / len(buckets)
    if max(sizes) >= MIN_SPREAD * min(sizes):
        spread = sum((size - mean_size) ** 2 for size in sizes)
        slope = (
            sum((bucket.num_bytes - mean_size) * (bucket.reduce_s - mean_s) for bucket in buckets)
            / spread
        )
        slope = min(max(slope, 0.0), mean_s / mean_size)  # neither term of the sum is negative
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
    buckets: Sequence[Bucket], sent_part: float, cost: Callable[[float], float]
) -> Iterator[CapPlan]:
    """For each of CAPS_MB. `sent_part`: the bytes that are sent for a byte of gradients, which the
    size of a bucket counts."""
    ready = [
        ReadyBucket(num_bytes=bucket.num_bytes, ready_s=bucket.backward_s) for bucket in buckets
    ]
    for cap in CAPS_MB:
        plan = planned(ready, cap * MIB * sent_part, begin_s=0.0)
        queue = [(cost(bucket.num_bytes), bucket.ready_s) for bucket in plan]
        yield CapPlan(cap, exposed_s(queue), sum(seconds for seconds, _ in queue))
