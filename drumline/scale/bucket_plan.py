"""What DDP's buckets would cost at another size: latency and bandwidth of the measured all-reduces, and a queue of the
planned ones behind the backward pass. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drumline.scale.profile_result import Bucket

CAPS_MB = (25.0, 1.0, 5.0, 10.0, 50.0, 100.0, 200.0)
"""The sizes that are compared; DDP's default first, since it is taken where others bring no more."""
MIN_SPREAD = 2.0
LARGE = 1 << 20
SLOWEST_LINK = 12.5e6
"""Bytes per second: no slower link is assumed where the bandwidth is not known."""


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
    """The cost of an all-reduce: one where the buckets' sizes differ enough to tell latency and bandwidth apart, or
    where `doctor` has measured the bandwidth. Otherwise two, the likely one first: small ones are latency, unless the
    link is very slow, and large ones are bytes."""
    sizes = [bucket.num_bytes for bucket in buckets]
    mean_size, mean_s = sum(sizes) / len(sizes), sum(bucket.reduce_s for bucket in buckets) / len(buckets)
    if max(sizes) >= MIN_SPREAD * min(sizes):
        spread = sum((size - mean_size) ** 2 for size in sizes)
        slope = sum((one.num_bytes - mean_size) * (one.reduce_s - mean_s) for one in buckets) / spread
        slope = min(max(slope, 0.0), mean_s / mean_size)  # neither term of the sum is negative
        return (ReduceCost(latency_s=mean_s - slope * mean_size, s_per_byte=slope),)
    all_of_it = mean_s / mean_size
    speeds = [network_bytes_per_s] if network_bytes_per_s else [math.inf, SLOWEST_LINK]
    slopes = [min(2 * (world_size - 1) / world_size / speed, all_of_it) for speed in speeds]
    if mean_size >= LARGE and not network_bytes_per_s:
        slopes = [all_of_it, all_of_it / 2]
    return tuple(ReduceCost(latency_s=mean_s - slope * mean_size, s_per_byte=slope) for slope in slopes)


def planned(buckets: Sequence[Bucket], cap_mb: float) -> list[tuple[float, float]]:
    """The buckets of another size: the bytes of each, and when in the backward pass it is ready. DDP makes a smaller
    first bucket only where no size is given."""
    total, cap = sum(bucket.num_bytes for bucket in buckets), cap_mb * 2**20
    found: list[tuple[float, float]] = []
    filled = 0.0
    while filled < total:
        size = min(cap, total - filled)
        filled += size
        found.append((size, _ready_at(buckets, filled)))
    return found


def _ready_at(buckets: Sequence[Bucket], num_bytes: float) -> float:
    """When this many bytes of gradients are ready, interpolated between the measured buckets."""
    before_bytes = before_s = 0.0
    for bucket in buckets:
        if before_bytes + bucket.num_bytes >= num_bytes:
            share = (num_bytes - before_bytes) / bucket.num_bytes
            return before_s + share * (bucket.backward_s - before_s)
        before_bytes, before_s = before_bytes + bucket.num_bytes, bucket.backward_s
    return before_s


def exposed_s(queue: Sequence[tuple[float, float]]) -> float:
    """How long all-reduces continue after the last gradient: each has a duration and a time when it is ready, and one
    runs after the other."""
    end = 0.0
    for seconds, ready in queue:
        end = max(end, ready) + seconds
    return max(0.0, end - max(ready for _, ready in queue))


def exposed_by_cap(buckets: Sequence[Bucket], cost: Callable[[float], float]) -> Iterator[tuple[float, float, float]]:
    """For each of CAPS_MB: the size, the exposed time, and the time of all its all-reduces."""
    for cap in CAPS_MB:
        queue = [(cost(size), ready) for size, ready in planned(buckets, cap)]
        yield cap, exposed_s(queue), sum(seconds for seconds, _ in queue)
