"""One step of DDP as events: buckets become ready in the backward pass, all-reduces share the
network, the slowest rank sets the pace. Times come from a profile (profile_result.py) and a network
(network_model.py). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from drumline.base.errors import UsageError
from drumline.base.text import MIB
from drumline.report.profile.bucket_plan import ReadyBucket, planned
from drumline.runs.profile_result import ProfileResult, sent_part
from drumline.tools.scale.network_model import Network, Transfer, all_reduce

SMALL_BYTES = 4096
MAX_SPREAD = 64
"""Of more compute times, as many even quantiles are kept."""
SIMULATED = {"dist.mode": "ddp", "dist.sync": "step", "train.exact": "world"}
"""The settings with which DDP reduces all gradients in each step."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a rank does in a step when it waits for no other."""

    data_s: float
    own_s: float
    """Compute with its launch gaps and host synchronisation."""
    backward_s: float
    """From the start of compute to that of the last backward pass."""
    buckets: tuple[ReadyBucket, ...]
    """By the compute of a rank of average speed."""
    bucket_cap_mb: float
    sent_part: float | None
    """Bytes that are sent for a byte of gradients; None: not known, so that buckets cannot have
    another size."""
    spread: tuple[float, ...]
    """Compute times of ranks and steps as parts of their mean, sorted."""
    other_collectives: float
    repeats_others: bool
    """Whether each micro-batch has them, as those of SyncBatchNorm."""
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
    def gradient_bytes(self) -> float:
        return sum(bucket.num_bytes for bucket in self.buckets) / (self.sent_part or 1.0)

    def with_bucket_cap(self, megabytes: float) -> StepShape:
        """The same gradients in buckets of this size; as they are, if nothing is known about
        another size."""
        if self.sent_part is None:
            return self
        buckets = planned(self.buckets, megabytes * MIB * self.sent_part, begin_s=self.backward_s)
        return replace(self, buckets=buckets, bucket_cap_mb=megabytes)

    def with_accumulation(self, micro_batches: int) -> StepShape:
        """The same micro-batches, of which this many make a step: gradients are reduced in the last
        one only."""
        times = micro_batches / self.accumulate
        more_s = (micro_batches - self.accumulate) * self.buckets[-1].ready_s / self.accumulate
        return replace(
            self,
            own_s=self.own_s + more_s,
            data_s=self.data_s * times,
            backward_s=self.backward_s + more_s,
            buckets=tuple(
                replace(bucket, ready_s=bucket.ready_s + more_s) for bucket in self.buckets
            ),
            other_collectives=self.other_collectives * (times if self.repeats_others else 1),
            accumulate=micro_batches,
        )


def shape_of(profile: ProfileResult) -> StepShape:
    """From a profile of at least one rank with its buckets. A UsageError says what is missing, or
    that its job is none that is simulated."""
    _check_mode(profile)
    _check_buckets(profile)
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
            ReadyBucket(num_bytes=bucket.num_bytes, ready_s=min(ready_s, own_s))
            for bucket, ready_s in zip(profile.buckets, ready, strict=True)
        ),
        bucket_cap_mb=profile.bucket_cap_mb,
        sent_part=sent_part(profile.settings),
        spread=_quantiles(sorted(seconds / compute_s for seconds in times)),
        other_collectives=profile.other_collectives,
        # Of a script it is not known: the more expensive case is assumed.
        repeats_others=profile.settings.get("dist.sync_batchnorm", "true") == "true",
        accumulate=max(1, profile.accumulate),
    )


def _check_mode(profile: ProfileResult) -> None:
    """Refuses jobs that gather parameters, or that do not reduce gradients in each step."""
    for setting, simulated in SIMULATED.items():
        value = profile.settings.get(setting, simulated)
        if value != simulated:
            flag = f"--{setting} {value}"
            raise UsageError(
                f"the profile is of a job with {flag}, and only the all-reduces of DDP are simulated",
                next_step=f"measure it: drumline scale measure TASK --world 2,4 {flag}, or predict it "
                f"from a profile without {flag}, if the model fits so",
            )


def _check_buckets(profile: ProfileResult) -> None:
    if profile.buckets and min(bucket.num_bytes for bucket in profile.buckets) >= 1:
        return
    if not profile.buckets and profile.other_collectives:
        raise UsageError(
            f"the profile has {profile.other_collectives:.0f} collectives a step, none of them DDP's "
            "all-reduces of gradients, and only those are simulated",
            next_step="profile the job with DistributedDataParallel, if the model fits so",
        )
    what = "bytes" if profile.buckets else "buckets"
    raise UsageError(
        f"the profile has no {what} of gradients, so nothing is known about communication",
        next_step="profile the job on two ranks or more, without PowerSGD: drumline profile TASK --procs 2",
    )


def _quantiles(values: list[float]) -> tuple[float, ...]:
    if len(values) <= MAX_SPREAD:
        return tuple(values)
    last = len(values) - 1
    return tuple(
        values[place * last // (MAX_SPREAD - 1)] for place in range(MAX_SPREAD)
    )  # with the largest


def step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """The mean length of a step on `nodes` times `per_node` ranks: a step for each measured compute
    time, weighted by how often it is that of the slowest rank."""
    weights = slowest_weights(len(shape.spread), nodes * per_node)
    steps = zip(weights, shape.spread, strict=True)
    return sum(
        weight * _step_s(shape, network, nodes, per_node, factor)
        for weight, factor in steps
        if weight > 1e-9
    )


def typical_step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """One step, in which the slowest rank takes its mean time: nearly the same, and faster to
    compute."""
    return _step_s(shape, network, nodes, per_node, slowest_factor(shape, nodes * per_node))


def slowest_factor(shape: StepShape, ranks: int) -> float:
    """How long the slowest of so many ranks computes, as a part of the mean."""
    weights = slowest_weights(len(shape.spread), ranks)
    return sum(weight * factor for weight, factor in zip(weights, shape.spread, strict=True))


def slowest_weights(values: int, ranks: int) -> list[float]:
    """How often each of some sorted values is the largest of `ranks` draws from them."""
    return [((place + 1) / values) ** ranks - (place / values) ** ranks for place in range(values)]


def _step_s(shape: StepShape, network: Network, nodes: int, per_node: int, factor: float) -> float:
    """A step in which the slowest rank computes `factor` times as long as the mean."""
    transfers = [all_reduce(network, bucket.num_bytes, nodes, per_node) for bucket in shape.buckets]
    others_s = shape.other_collectives * all_reduce(network, SMALL_BYTES, nodes, per_node).alone_s
    ready = [bucket.ready_s * factor for bucket in shape.buckets]
    reduced_s = max(ready[-1], last_end(ready, transfers, network.lanes))
    return shape.data_s + others_s + reduced_s + shape.tail_s * factor


def last_end(ready: Sequence[float], transfers: Sequence[Transfer], lanes: int) -> float:
    """When the last of these all-reduces ends. They start in order, each when it is ready and one
    of the lanes is free; those that run share the slowest link, each at most at the rate it would
    have alone."""
    now = 0.0
    waiting = 0
    running: dict[int, float] = {}
    while waiting < len(ready) or running:
        while waiting < len(ready) and len(running) < lanes and ready[waiting] <= now:
            if transfers[waiting].busy_s > 0:
                running[waiting] = transfers[waiting].busy_s
            waiting += 1
        limits = {
            transfer: transfers[transfer].busy_s / transfers[transfer].alone_s
            for transfer in running
        }
        rates = _shared(limits)
        ends = {transfer: now + left / rates[transfer] for transfer, left in running.items()}
        starts = [ready[waiting]] if waiting < len(ready) and len(running) < lanes else []
        later = min([*ends.values(), *starts], default=now)
        running = {
            transfer: left - rates[transfer] * (later - now)
            for transfer, left in running.items()
            if ends[transfer] > later
        }
        now = later
    return now


def _shared(limits: Mapping[int, float]) -> dict[int, float]:
    """Equal parts of one link, where none gets more than its limit."""
    rates: dict[int, float] = {}
    left = 1.0
    for number, (transfer, limit) in enumerate(sorted(limits.items(), key=lambda item: item[1])):
        rates[transfer] = min(limit, left / (len(limits) - number))
        left -= rates[transfer]
    return rates
