"""One step of DDP as events: buckets become ready in the backward pass, all-reduces share the network, the slowest rank
sets the pace. Times come from a profile (profile_result.py) and a network (network_model.py). No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean

from drumline.errors import UsageError
from drumline.scale.network_model import Network, Transfer, all_reduce
from drumline.scale.profile_result import ProfileResult
from drumline.text import MIB

SMALL_BYTES = 4096
MAX_SPREAD = 64
"""Of more compute times, as many even quantiles are kept."""


@dataclass(frozen=True, kw_only=True)
class ReadyBucket:
    """A bucket of gradients, and when a rank of average speed has it ready, from the start of its compute."""

    num_bytes: int
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a rank does in a step when it waits for no other."""

    data_s: float
    own_s: float
    """Compute with its launch gaps and host synchronisation."""
    backward_s: float
    """From the start of compute to that of the last backward pass."""
    buckets: tuple[ReadyBucket, ...]
    spread: tuple[float, ...]
    """Compute times of ranks and steps as parts of their mean, sorted."""
    other_collectives: float
    accumulate: int

    @property
    def alone_s(self) -> float:
        """The step of a single rank."""
        return self.data_s + self.own_s

    @property
    def tail_s(self) -> float:
        """What follows the last bucket: the optimizer."""
        return max(0.0, self.own_s - self.buckets[-1].ready_s)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def with_bucket_cap(self, megabytes: float) -> StepShape:
        """The same gradients in buckets of this size: their ready times are interpolated between the measured ones."""
        size, total = max(1, round(megabytes * MIB)), self.num_bytes
        ends = [*range(size, total, size), total]
        sizes = [last - first for first, last in pairwise([0, *ends])]
        ready = (self._ready_s(end) for end in ends)
        return replace(
            self, buckets=tuple(ReadyBucket(num_bytes=size, ready_s=at) for size, at in zip(sizes, ready, strict=True))
        )

    def with_accumulation(self, micro_batches: int) -> StepShape:
        """The same micro-batches, of which this many make a step: only the last one communicates."""
        more_s = (micro_batches - self.accumulate) * self.buckets[-1].ready_s / self.accumulate
        buckets = tuple(replace(bucket, ready_s=bucket.ready_s + more_s) for bucket in self.buckets)
        return replace(
            self,
            own_s=self.own_s + more_s,
            data_s=self.data_s * micro_batches / self.accumulate,
            backward_s=self.backward_s + more_s,
            buckets=buckets,
            accumulate=micro_batches,
        )

    def _ready_s(self, num_bytes: int) -> float:
        sizes = [0, *accumulate(bucket.num_bytes for bucket in self.buckets)]
        times = [self.backward_s, *(bucket.ready_s for bucket in self.buckets)]
        place = max(1, bisect_left(sizes, num_bytes))
        (low, high), (before, after) = sizes[place - 1 : place + 1], times[place - 1 : place + 1]
        return before + (after - before) * (num_bytes - low) / (high - low)


def shape_of(profile: ProfileResult) -> StepShape:
    """From a profile of at least one rank with its buckets."""
    if not profile.buckets or min(bucket.num_bytes for bucket in profile.buckets) < 1:
        raise UsageError(
            "the profile has no buckets of gradients, so nothing is known about communication",
            next_step="profile the job on two ranks or more: drumline profile TASK --procs 2",
        )
    times = [seconds for rank in profile.ranks for seconds in rank.compute_s]
    compute_s = fmean(times) if times else 0.0
    if not compute_s > 0 or not all(map(math.isfinite, [*times, *profile.parts_s.values()])):
        raise UsageError("the profile has no compute time", next_step="profile the job again")
    own_s = compute_s + profile.parts_s.get("host_sync", 0.0) + profile.parts_s.get("gaps", 0.0)
    if profile.unprofiled_step_s is not None:  # less what the profiler itself took
        own_s = max(own_s / 2, min(own_s, own_s - profile.step_s + profile.unprofiled_step_s))
    stretch = own_s / compute_s  # gaps and synchronisation are spread over the step
    first = profile.buckets[0]
    ready = accumulate((bucket.ready_s * stretch for bucket in profile.buckets), max)
    return StepShape(
        data_s=profile.parts_s.get("data", 0.0),
        own_s=own_s,
        backward_s=max(0.0, first.ready_s - first.backward_s) * stretch,
        buckets=tuple(
            ReadyBucket(num_bytes=bucket.num_bytes, ready_s=min(at, own_s))
            for bucket, at in zip(profile.buckets, ready, strict=True)
        ),
        spread=_quantiles(sorted(seconds / compute_s for seconds in times)),
        other_collectives=profile.other_collectives,
        accumulate=max(1, profile.accumulate),
    )


def _quantiles(values: list[float]) -> tuple[float, ...]:
    if len(values) <= MAX_SPREAD:
        return tuple(values)
    edges = [place * len(values) // MAX_SPREAD for place in range(MAX_SPREAD + 1)]
    means = [fmean(values[first:last]) for first, last in pairwise(edges)]
    return (*means[:-1], values[-1])  # the largest matters most


def step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """The mean length of a step on `nodes` times `per_node` ranks: a step for each measured compute time, weighted by
    how often it is that of the slowest rank."""
    weights = slowest_weights(len(shape.spread), nodes * per_node)
    steps = zip(weights, shape.spread, strict=True)
    return sum(weight * _step_s(shape, network, nodes, per_node, factor) for weight, factor in steps if weight > 1e-9)


def typical_step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """One step, in which the slowest rank takes its mean time: nearly the same, and faster to compute."""
    weights = slowest_weights(len(shape.spread), nodes * per_node)
    return _step_s(shape, network, nodes, per_node, sum(map(mul, weights, shape.spread)))


def slowest_weights(values: int, ranks: int) -> list[float]:
    """How often each of some sorted values is the largest of `ranks` draws from them."""
    return [((place + 1) / values) ** ranks - (place / values) ** ranks for place in range(values)]


def _step_s(shape: StepShape, network: Network, nodes: int, per_node: int, factor: float) -> float:
    transfers = [all_reduce(network, bucket.num_bytes, nodes, per_node) for bucket in shape.buckets]
    others_s = shape.other_collectives * all_reduce(network, SMALL_BYTES, nodes, per_node).alone_s
    return shape.data_s + others_s + one_step_s(shape, transfers, network.lanes, factor)


def one_step_s(shape: StepShape, transfers: Sequence[Transfer], lanes: int, factor: float) -> float:
    """A step in which the slowest rank computes `factor` times as long as the mean."""
    ready = [bucket.ready_s * factor for bucket in shape.buckets]
    return max(ready[-1], last_end(ready, transfers, lanes)) + shape.tail_s * factor


def last_end(ready: Sequence[float], transfers: Sequence[Transfer], lanes: int) -> float:
    """When the last of these all-reduces ends. They start in order, each when it is ready and one of the lanes is free;
    those that run share the slowest link, each at most at the rate it would have alone."""
    now, waiting = 0.0, 0
    running: dict[int, float] = {}
    while waiting < len(ready) or running:
        while waiting < len(ready) and len(running) < lanes and ready[waiting] <= now:
            if transfers[waiting].busy_s > 0:
                running[waiting] = transfers[waiting].busy_s
            waiting += 1
        rates = _shared([(one, transfers[one].busy_s / transfers[one].alone_s) for one in running])
        ends = {one: now + left / rates[one] for one, left in running.items()}
        starts = [ready[waiting]] if waiting < len(ready) and len(running) < lanes else []
        later = min([*ends.values(), *starts], default=now)
        running = {one: left - rates[one] * (later - now) for one, left in running.items() if ends[one] > later}
        now = later
    return now


def _shared(limits: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Equal parts of one link, where none gets more than its limit."""
    rates: dict[int, float] = {}
    left = 1.0
    for number, (one, limit) in enumerate(sorted(limits, key=lambda item: item[1])):
        rates[one] = min(limit, left / (len(limits) - number))
        left -= rates[one]
    return rates
