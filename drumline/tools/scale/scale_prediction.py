"""What a job would reach on other numbers of nodes: step time, efficiency, goodput and cost, from a
profile (profile_result.py), a network (network_model.py) and the simulation of steps. No torch.

A step of DDP is simulated as events: buckets become ready in the backward pass, all-reduces share
the network, the slowest rank sets the pace. Of two buckets that are ready after 10 and 20 ms, each
of which takes 15 ms to reduce on one lane, the second waits for the first until 25 ms, and the last
one ends at 40 ms."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, quantiles, stdev
from typing import TypeVar

from drumline.base.errors import UsageError
from drumline.base.text import MIB, one_line
from drumline.report.curves import evenly
from drumline.report.profile.bucket_plan import ReadyGradients, planned
from drumline.runs.profile_result import (
    Bucket,
    GradientTensor,
    ProfileResult,
    RankSteps,
    most_crowded,
    sent_part,
)
from drumline.runs.scaling_result import PredictedSize, Prediction, ScaleOptions
from drumline.tools.scale.network_model import Network, Transfer, all_reduce

Gradients = TypeVar("Gradients", Bucket, GradientTensor)


# The shape of a step, from a profile

SIMULATED = {"dist.mode": "ddp", "dist.sync": "step", "train.exact": "world"}
"""The settings with which DDP reduces all gradients in each step."""
MAX_PACES = 64
"""Of more steps of ranks, as many even quantiles are kept."""
STALL = 1.5
"""A step is a stall if it is so many times as long as the others on average."""
STEPS_PER_STALL = 4
"""More stalls are a part of the job. One may be seen in two steps: in that of the rank which
stalled, and in the next one of a rank that waited for it."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a rank takes in a step, as parts of the means."""

    compute: float
    host: float


AVERAGE = Pace(compute=1.0, host=1.0)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a rank does in a step when it waits for no other."""

    data_s: float
    compute_s: float
    host_s: float
    """Python, launch gaps and host synchronisation. They vary by themselves: a rank that waits in
    Python is no slower where another computes longer."""
    buckets: tuple[ReadyGradients, ...]
    """By the times of a rank of average speed; their bytes are those that are sent."""
    tensors: tuple[ReadyGradients, ...]
    """The gradients in the order in which DDP puts them into buckets; empty: not known, so that
    buckets cannot have another size."""
    bucket_cap_mb: float
    sent_part: float | None
    """Bytes that are sent for a byte of gradients; None: not known, so that buckets cannot have
    another size."""
    paces: tuple[Pace, ...]
    """Of ranks and steps."""
    other_collectives: float
    repeats_others: bool
    """Whether each micro-batch has them, as those of SyncBatchNorm."""
    accumulate: int

    @property
    def alone_s(self) -> float:
        """The step of a single rank."""
        return self.data_s + self.own_s()

    @property
    def gradient_bytes(self) -> float:
        """The bytes of all gradients, of which fewer are sent where they are rounded."""
        return sum(bucket.num_bytes for bucket in self.buckets) / (self.sent_part or 1.0)

    def own_s(self, pace: Pace = AVERAGE) -> float:
        """What a rank of this pace takes for its own work, without data."""
        return self.compute_s * pace.compute + self.host_s * pace.host

    def tail_s(self, pace: Pace) -> float:
        """What follows the last bucket: the optimizer."""
        last = self.buckets[-1]
        compute_s = max(0.0, self.compute_s - last.compute_s)
        host_s = max(0.0, self.host_s - last.host_s)

        return compute_s * pace.compute + host_s * pace.host

    def with_bucket_cap(self, megabytes: float) -> StepShape:
        """The same gradients in buckets of this size; as they are, if nothing is known about
        another size."""
        if self.sent_part is None or not self.tensors:
            return self

        buckets = []
        for bucket in planned(self.tensors, megabytes * MIB):
            sent_bytes = round(bucket.num_bytes * self.sent_part)
            buckets.append(replace(bucket, num_bytes=sent_bytes))

        return replace(self, buckets=tuple(buckets), bucket_cap_mb=megabytes)

    def with_accumulation(self, micro_batches: int) -> StepShape:
        """The same micro-batches, of which this many make a step: gradients are reduced in the last
        one only."""
        times = micro_batches / self.accumulate
        last = self.buckets[-1]
        compute_s = (times - 1) * last.compute_s
        host_s = (times - 1) * last.host_s
        times_others = times if self.repeats_others else 1

        return replace(
            self,
            compute_s=self.compute_s + compute_s,
            host_s=self.host_s + host_s,
            data_s=self.data_s * times,
            buckets=_later(self.buckets, compute_s, host_s),
            tensors=_later(self.tensors, compute_s, host_s),
            other_collectives=self.other_collectives * times_others,
            accumulate=micro_batches,
        )


def _later(
    gradients: Sequence[ReadyGradients],
    compute_s: float,
    host_s: float,
) -> tuple[ReadyGradients, ...]:
    """The same gradients, each ready after so much more work."""
    later = []
    for gradient in gradients:
        compute_until_s = gradient.compute_s + compute_s
        host_until_s = gradient.host_s + host_s
        later.append(replace(gradient, compute_s=compute_until_s, host_s=host_until_s))

    return tuple(later)


def shape_of(profile: ProfileResult) -> StepShape:
    """From a profile of at least one rank with its buckets. A UsageError says what is missing, or
    that its job is none that is simulated."""
    _check_mode(profile)
    _check_buckets(profile)
    profile = _without_stalls(profile)
    compute_s = _compute_s(profile)
    host_s = _host_s(profile)
    times = [compute_s, host_s, *_times(profile)]

    if not compute_s > 0 or not all(map(math.isfinite, times)):
        raise UsageError("the profile has no compute time", next_step="profile the job again")

    part = _unprofiled_part(profile, compute_s + host_s)

    def ready(gradients: Bucket | GradientTensor, until_s: float) -> ReadyGradients:
        """When these are ready, without the profiler. `until_s`: what the host does until then."""
        return ReadyGradients(
            num_bytes=gradients.num_bytes,
            compute_s=min(gradients.ready_s, compute_s) * part,
            host_s=until_s * part,
        )

    # Where it was not recorded what the host does until then, it is spread over the step.
    usual_host = host_s / compute_s
    buckets = [ready(bucket, _until_ready(bucket, usual_host)) for bucket in profile.buckets]
    tensors = [ready(tensor, tensor.host_s) for tensor in profile.tensors]

    return StepShape(
        data_s=profile.parts_s.get("data", 0.0),
        compute_s=compute_s * part,
        host_s=host_s * part,
        buckets=_in_order(buckets),
        tensors=tuple(tensors),
        bucket_cap_mb=profile.bucket_cap_mb,
        sent_part=sent_part(profile.settings),
        paces=_paces(profile, compute_s, host_s),
        other_collectives=profile.other_collectives,
        # Of a script it is not known: the more expensive case is assumed.
        repeats_others=profile.settings.get("dist.sync_batchnorm", "true") == "true",
        accumulate=max(1, profile.accumulate),
    )


def _without_stalls(profile: ProfileResult) -> ProfileResult:
    """Without single steps that are far longer than the others, if the steps that were not profiled
    say that they are no part of the job: another program that used the CPU, say.

    Gradients are then ready earlier in proportion, since they were recorded as means over all steps."""
    if profile.unprofiled_step_s is None:
        return profile

    steps_by_rank = [rank.step_s for rank in profile.ranks]
    lengths = [max(seconds) for seconds in zip(*steps_by_rank, strict=True)]
    usual_steps = _usual_steps(lengths, profile.unprofiled_step_s)
    if len(usual_steps) == len(lengths):
        return profile

    ranks = tuple(_of_steps(rank, usual_steps) for rank in profile.ranks)
    usual = replace(profile, ranks=ranks, step_s=fmean(lengths[step] for step in usual_steps))
    host_s = _host_s(profile)
    pace = Pace(
        compute=_compute_s(usual) / _compute_s(profile),
        host=_host_s(usual) / host_s if host_s else 1.0,
    )

    return replace(
        usual,
        buckets=tuple(_at_pace(bucket, pace) for bucket in profile.buckets),
        tensors=tuple(_at_pace(tensor, pace) for tensor in profile.tensors),
    )


def _usual_steps(lengths: Sequence[float], unprofiled_s: float) -> list[int]:
    """All but the few long ones without which the mean is nearer to that of the other steps."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _ in range(len(lengths) // STEPS_PER_STALL):
        mean_s = fmean(lengths[step] for step in by_length)
        shorter_s = fmean(lengths[step] for step in by_length[:-1])
        is_stall = lengths[by_length[-1]] > STALL * shorter_s
        is_nearer = abs(shorter_s - unprofiled_s) < abs(mean_s - unprofiled_s)

        if not is_stall or not is_nearer:
            break

        by_length.pop()

    return sorted(by_length)


def _of_steps(rank: RankSteps, steps: Sequence[int]) -> RankSteps:
    """The same rank with these of its steps alone."""
    host_s = tuple(rank.host_s[step] for step in steps) if rank.host_s else ()
    return replace(
        rank,
        step_s=tuple(rank.step_s[step] for step in steps),
        compute_s=tuple(rank.compute_s[step] for step in steps),
        host_s=host_s,
    )


def _at_pace(gradients: Gradients, pace: Pace) -> Gradients:
    """The same gradients, ready earlier or later in proportion."""
    ready_s = gradients.ready_s * pace.compute
    host_s = None if gradients.host_s is None else gradients.host_s * pace.host
    return replace(gradients, ready_s=ready_s, host_s=host_s)


def _compute_s(profile: ProfileResult) -> float:
    """How long a rank computes in a step, on average."""
    times = [seconds for rank in profile.ranks for seconds in rank.compute_s]
    return fmean(times) if times else 0.0


def _host_s(profile: ProfileResult) -> float:
    """How long the host keeps a rank from its work in a step, on average."""
    times = [seconds for rank in profile.ranks for seconds in rank.host_s]
    if times:
        return fmean(times)

    return profile.parts_s.get("host_sync", 0.0) + profile.parts_s.get("gaps", 0.0)


def _times(profile: ProfileResult) -> Iterator[float]:
    """All times that have to be finite numbers."""
    yield from profile.parts_s.values()
    for bucket in profile.buckets:
        yield bucket.ready_s + (bucket.host_s or 0.0)

    for tensor in profile.tensors:
        yield tensor.ready_s + tensor.host_s


def _unprofiled_part(profile: ProfileResult, own_s: float) -> float:
    """What is left of a rank's own time without what the profiler took of it. Steps differ by
    themselves, also by their communication: what is within this noise was not the profiler."""
    if profile.unprofiled_step_s is None:
        return 1.0

    profiler_s = profile.step_s - profile.unprofiled_step_s
    if profiler_s <= 2 * _step_noise_s(profile):
        return 1.0

    return max(0.5, 1 - profiler_s / own_s)


def _step_noise_s(profile: ProfileResult) -> float:
    """The standard error of the difference between two means of as many steps as were profiled."""
    steps = profile.ranks[0].step_s
    if len(steps) < 2:
        return 0.0

    return stdev(steps) * math.sqrt(2 / len(steps))


def _until_ready(bucket: Bucket, usual_host: float) -> float:
    """What the host does until a bucket is ready."""
    return bucket.ready_s * usual_host if bucket.host_s is None else bucket.host_s


def _in_order(buckets: Sequence[ReadyGradients]) -> tuple[ReadyGradients, ...]:
    """DDP starts all-reduces in the order of its buckets, so that none is earlier than the one
    before."""
    ordered: list[ReadyGradients] = []
    for bucket in buckets:
        if ordered and bucket.ready_s < ordered[-1].ready_s:
            ordered.append(replace(ordered[-1], num_bytes=bucket.num_bytes))
        else:
            ordered.append(bucket)

    return tuple(ordered)


def _paces(profile: ProfileResult, compute_s: float, host_s: float) -> tuple[Pace, ...]:
    """How long each rank took in each step, as parts of the means. What the host did in the same step goes
    with it where it was recorded, and is as usual in all steps where it was not."""
    paces = []
    for rank in profile.ranks:
        hosts = [1.0] * len(rank.compute_s)
        if host_s > 0 and len(rank.host_s) == len(rank.compute_s):
            hosts = [seconds / host_s for seconds in rank.host_s]

        for seconds, host in zip(rank.compute_s, hosts, strict=True):
            paces.append(Pace(compute=seconds / compute_s, host=host))

    paces.sort(key=lambda pace: compute_s * pace.compute + host_s * pace.host)
    return tuple(evenly(paces, MAX_PACES))


def _check_mode(profile: ProfileResult) -> None:
    """Refuses jobs that gather parameters, or that do not reduce gradients in each step."""
    for setting, simulated in SIMULATED.items():
        value = profile.settings.get(setting, simulated)
        if value != simulated:
            flag = f"--{setting} {one_line(value)}"
            raise UsageError(
                f"the profile is of a job with {flag}, and only the all-reduces of DDP are simulated",
                next_step=f"measure it: drumline scale measure TASK --world 2,4 {flag}, or predict it "
                f"from a profile without {flag}, if the model fits so",
            )


def _check_buckets(profile: ProfileResult) -> None:
    """Refuses profiles whose communication is not known."""
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


# A step, simulated

SMALL_BYTES = 4096


def step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """The mean length of a step on `nodes` times `per_node` ranks: a step for each measured pace,
    weighted by how often it is that of the slowest rank."""
    return sum(
        weight * _step_s(shape, network, nodes, per_node, pace)
        for weight, pace in _slowest(shape, nodes * per_node)
        if weight > 1e-9
    )


def typical_step_s(shape: StepShape, network: Network, nodes: int, per_node: int) -> float:
    """One step, in which the slowest rank takes its mean time: nearly the same, and faster to
    compute."""
    return _step_s(shape, network, nodes, per_node, slowest_pace(shape, nodes * per_node))


def slowest_pace(shape: StepShape, ranks: int) -> Pace:
    """That of the slowest of so many ranks, on average."""
    slowest = _slowest(shape, ranks)
    return Pace(
        compute=sum(weight * pace.compute for weight, pace in slowest),
        host=sum(weight * pace.host for weight, pace in slowest),
    )


def _slowest(shape: StepShape, ranks: int) -> list[tuple[float, Pace]]:
    """How often each pace is that of the slowest of so many ranks."""
    paces = sorted(shape.paces, key=shape.own_s)
    return list(zip(slowest_weights(len(paces), ranks), paces, strict=True))


def slowest_weights(values: int, ranks: int) -> list[float]:
    """How often each of some sorted values is the largest of `ranks` draws from them: of two values
    and two draws, the first one time in four."""
    below = [(place / values) ** ranks for place in range(values + 1)]
    return [upper - lower for lower, upper in pairwise(below)]


def _step_s(shape: StepShape, network: Network, nodes: int, per_node: int, pace: Pace) -> float:
    """A step in which the slowest rank has this pace."""
    transfers = []
    ready = []
    for bucket in shape.buckets:
        transfers.append(all_reduce(network, bucket.num_bytes, nodes, per_node))
        ready.append(bucket.compute_s * pace.compute + bucket.host_s * pace.host)

    small = all_reduce(network, SMALL_BYTES, nodes, per_node)
    others_s = shape.other_collectives * small.alone_s
    reduced_s = max(ready[-1], last_end(ready, transfers, network.lanes))

    return shape.data_s + others_s + reduced_s + shape.tail_s(pace)


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

        # All runs on until the next one ends or starts.
        rates = _shared({number: transfers[number].rate_alone for number in running})
        ends = {number: now + left / rates[number] for number, left in running.items()}
        has_free_lane = len(running) < lanes
        starts = ready[waiting : waiting + 1] if has_free_lane else []
        later = min([*ends.values(), *starts], default=now)
        running = {
            number: left - rates[number] * (later - now)
            for number, left in running.items()
            if ends[number] > later
        }
        now = later

    return now


def _shared(limits: Mapping[int, float]) -> dict[int, float]:
    """Equal parts of one link, where none gets more than its limit: with limits of 0.2 and 0.9 the
    rates are 0.2 and 0.8."""
    rates: dict[int, float] = {}
    left = 1.0
    for transfer in sorted(limits, key=limits.__getitem__):
        equal_part = left / (len(limits) - len(rates))
        rates[transfer] = min(limits[transfer], equal_part)
        left -= rates[transfer]

    return rates


# The prediction

MODEL_ERROR = 0.074
"""The worst error of the grid in docs/scaling.md (`make bench-scale`), which is over gloo."""
NCCL_ERROR = 0.15
"""Assumed, since NCCL's model was not compared with a cluster: published predictors of training
steps are 2 to 15% off."""
MOST_CPU_WAIT = 0.25
"""Of a step. With more, the interval would be a third of the step wide on both sides, and decide
nothing."""
REPLICATES = 40
DAY_S = 86400.0
StepTime = Callable[[StepShape], float]
"""How long a step of this shape takes."""


def predict(
    profile: ProfileResult,
    network: Network,
    options: ScaleOptions,
    *,
    source: str,
) -> Prediction:
    """What is expected on each number of nodes, from the profile of one job; the same profile gives
    the same numbers."""
    shape = shape_of(profile)
    wait_part = _cpu_wait_part(profile)
    is_compared = network.backend == "gloo"
    model_error = MODEL_ERROR if is_compared else NCCL_ERROR
    # The waits are in the times of the profile. Where the job will run there may be none, or twice
    # as many.
    error = model_error + (wait_part or 0.0)

    if options.accumulate is not None:
        shape = shape.with_accumulation(options.accumulate)

    if options.bucket_cap_mb is not None:
        _check_buckets_can_change(shape)
        shape = shape.with_bucket_cap(options.bucket_cap_mb)

    num_micro_batches = profile.world_size * max(1, profile.accumulate)
    batch = None
    if profile.batch_size is not None:
        batch = profile.batch_size / num_micro_batches * shape.accumulate

    sizes = []
    for nodes in sorted(set(options.nodes)):
        sizes.append(_size(shape, network, options, nodes, batch, error))

    return Prediction(
        made_at=time.time(),
        task=profile.task,
        device=profile.device,
        profile=source,
        profile_ranks=profile.world_size,
        batch_per_rank=batch,
        accumulate=shape.accumulate,
        network=network.between.name,
        network_source=network.between.source,
        inside=network.inside.name,
        inside_source=network.inside.source,
        alone_s=shape.alone_s,
        model_error=model_error,
        is_model_compared=is_compared,
        cpu_wait_part=wait_part,
        stops_paying=_stops_paying(shape, network, options),
        options=options,
        sizes=tuple(sizes),
    )


def _cpu_wait_part(profile: ProfileResult) -> float | None:
    """How crowded the machine of the profile was; a UsageError where its times say little."""
    crowded = most_crowded(profile)
    if crowded is None:
        return None

    if not crowded.part <= MOST_CPU_WAIT:
        raise UsageError(
            f"the profile was taken on a crowded machine: rank {crowded.rank} on {one_line(crowded.host)} waited "
            f"for a CPU in {crowded.part:.0%} of its steps, and above {MOST_CPU_WAIT:.0%} nothing is predicted",
            next_step="profile the job again when nothing else runs there, on as many cores as it has ranks or more",
        )

    return max(0.0, crowded.part)


def _check_buckets_can_change(shape: StepShape) -> None:
    """Refuses another bucket size where the tensors or their bytes are not known."""
    if shape.sent_part is None:
        raise UsageError(
            "--bucket-cap-mb: what PowerSGD sends with another bucket size is not known",
            next_step="leave it out, or profile the job with --dist.comm none",
        )

    if not shape.tensors:
        raise UsageError(
            "--bucket-cap-mb: the profile does not have the sizes of the tensors, which DDP does not split",
            next_step="leave it out, or profile the job again with this version, all parameters of "
            "one type and without find_unused_parameters",
        )


def _size(
    shape: StepShape,
    network: Network,
    options: ScaleOptions,
    nodes: int,
    batch: float | None,
    error: float,
) -> PredictedSize:
    """What is expected on one number of nodes."""
    ranks = nodes * options.gpus_per_node

    def typical_s(candidate: StepShape) -> float:
        """A step of the job with a change, on these nodes."""
        return typical_step_s(candidate, network, nodes, options.gpus_per_node)

    alone_s = shape.alone_s
    mean_s = step_s(shape, network, nodes, options.gpus_per_node)
    first_s, last_s = _resampled(shape, typical_s)
    low_s = first_s * (1 - error)
    high_s = last_s * (1 + error)
    waiting_s = shape.own_s(slowest_pace(shape, ranks)) - shape.own_s()

    best_bucket = _best_bucket(shape, typical_s)
    best_accumulation = _best_accumulation(shape, typical_s)
    useful = goodput(mean_s, nodes, options)

    samples_per_day = None
    if batch is not None:
        samples_per_day = DAY_S / mean_s * useful * batch * ranks

    return PredictedSize(
        nodes=nodes,
        ranks=ranks,
        step_s=(low_s, mean_s, high_s),
        efficiency=(min(1.0, alone_s / high_s), alone_s / mean_s, min(1.0, alone_s / low_s)),
        goodput=useful,
        communication_s=max(0.0, mean_s - alone_s - waiting_s),
        waiting_s=waiting_s,
        samples_per_day=samples_per_day,
        cost_per_day=None if options.price is None else options.price * nodes * 24,
        best_bucket_cap_mb=best_bucket.bucket_cap_mb,
        best_bucket_step_s=typical_s(best_bucket),
        best_accumulate=best_accumulation.accumulate,
        best_accumulate_efficiency=best_accumulation.alone_s / typical_s(best_accumulation),
    )


def _resampled(shape: StepShape, typical_s: StepTime) -> tuple[float, float]:
    """The ends of 90% of the means of resampled steps: with few or uneven steps the interval is wider. The
    draws are the same at every call."""
    draw = random.Random(0)  # noqa: S311 - a simulation, not a secret
    means_s = []
    for _ in range(REPLICATES):
        paces = draw.choices(shape.paces, k=len(shape.paces))
        means_s.append(typical_s(replace(shape, paces=tuple(paces))))

    cuts = quantiles(means_s, n=20)
    return cuts[0], cuts[-1]


def goodput(mean_s: float, nodes: int, options: ScaleOptions) -> float:
    """The part of the time that goes into steps that are kept. A failure of any node costs the restart and,
    on average, half of the steps between two checkpoints: with more nodes there are more failures."""
    interval_s = options.checkpoint_every * mean_s
    saving = interval_s / (interval_s + options.checkpoint_pause_s)
    failures_per_s = nodes / (options.mtbf_hours * 3600)
    lost_s = options.restart_s + interval_s / 2

    return saving * max(0.0, 1 - failures_per_s * lost_s)


# What to change

BUCKET_CAPS_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
MAX_BUCKETS = 2000
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
WANTED_EFFICIENCY = 0.90


def _best_bucket(shape: StepShape, typical_s: StepTime) -> StepShape:
    """The bucket size with the shortest step; of those that are as good, the nearest to DDP's own
    25 MiB."""
    caps = [cap for cap in BUCKET_CAPS_MB if shape.gradient_bytes <= cap * MIB * MAX_BUCKETS]
    candidates = [shape.with_bucket_cap(cap) for cap in caps or BUCKET_CAPS_MB[-1:]]
    times = [typical_s(candidate) for candidate in candidates]
    longest = min(times) * 1.005
    good = [
        candidate
        for candidate, seconds in zip(candidates, times, strict=True)
        if seconds <= longest
    ]

    return min(good, key=lambda candidate: abs(math.log(candidate.bucket_cap_mb / 25.0)))


def _best_accumulation(shape: StepShape, typical_s: StepTime) -> StepShape:
    """With the fewest micro-batches that reach the wanted efficiency, or the most."""
    candidate = shape
    for count in ACCUMULATIONS:
        if candidate.alone_s / typical_s(candidate) >= WANTED_EFFICIENCY:
            break
        if count > shape.accumulate:
            candidate = shape.with_accumulation(count)

    return candidate


def _stops_paying(shape: StepShape, network: Network, options: ScaleOptions) -> int | None:
    """The first number of nodes after which an added node brings too little, on the way to the
    largest by doubling; None: all bring enough."""
    doubled = [1 << power for power in range(max(options.nodes).bit_length())]
    rates = {}
    for nodes in sorted({*options.nodes, *doubled}):
        seconds = typical_step_s(shape, network, nodes, options.gpus_per_node)
        rates[nodes] = goodput(seconds, nodes, options) * nodes / seconds

    least = options.pays_above * rates[1]
    for fewer, more_nodes in pairwise(rates):
        gain = (rates[more_nodes] - rates[fewer]) / (more_nodes - fewer)
        if gain < least:
            return fewer

    return None
