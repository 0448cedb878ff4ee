"""What a job would reach on other numbers of nodes: step time, efficiency, goodput and cost, from a
profile, a network and the simulation of steps. No torch.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from statistics import quantiles

from drumline.base.errors import UsageError
from drumline.base.terminal import one_line
from drumline.base.text import MIB
from drumline.runs.profile_result import ProfileResult, most_crowded
from drumline.runs.scaling_result import PredictedSize, Prediction, ScaleOptions
from drumline.tools.scale.network_model import Network
from drumline.tools.scale.simulation import (
    StepShape,
    shape_of,
    slowest_pace,
    step_s,
    typical_step_s,
)

MODEL_ERROR = 0.074
"""The worst error of the grid in docs/scaling.md (`make bench-scale`), which is over gloo."""
NCCL_ERROR = 0.15
"""Assumed, since NCCL's model was not compared with a cluster: published predictors of training
steps are 2 to 15% off."""
BUCKET_CAPS_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
WANTED_EFFICIENCY = 0.90
MAX_BUCKETS = 2000
REPLICATES = 40
MOST_CPU_WAIT = 0.25
"""Of a step. With more, the interval would be a third of the step wide on both sides, and decide
nothing."""
DAY_S = 86400.0


def predict(
    profile: ProfileResult, network: Network, options: ScaleOptions, *, source: str
) -> Prediction:
    """From the profile of one job; the same profile gives the same numbers."""
    shape = shape_of(profile)
    wait_part = _cpu_wait_part(profile)
    # The waits are in the times of the profile. Where the job will run there may be none, or twice
    # as many.
    error = _model_error(network) + (wait_part or 0.0)
    if options.accumulate is not None:
        shape = shape.with_accumulation(options.accumulate)
    if options.bucket_cap_mb is not None:
        _check_buckets_can_change(shape)
        shape = shape.with_bucket_cap(options.bucket_cap_mb)
    ranks = profile.world_size * max(1, profile.accumulate)
    batch = None if profile.batch_size is None else profile.batch_size / ranks * shape.accumulate
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
        model_error=_model_error(network),
        is_model_compared=network.backend == "gloo",
        cpu_wait_part=wait_part,
        stops_paying=_stops_paying(shape, network, options),
        options=options,
        sizes=tuple(
            _size(shape, network, options, nodes, batch, error=error)
            for nodes in sorted(set(options.nodes))
        ),
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
    *,
    error: float,
) -> PredictedSize:
    per_node = options.gpus_per_node
    alone_s = shape.alone_s
    mean_s = step_s(shape, network, nodes, per_node)
    first_s, last_s = _resampled(shape, network, nodes, per_node)
    low_s = first_s * (1 - error)
    high_s = last_s * (1 + error)
    useful = goodput(mean_s, nodes, options)
    waiting_s = shape.own_s(slowest_pace(shape, nodes * per_node)) - shape.own_s()
    best_cap, best_s = _best_bucket(shape, network, nodes, per_node)
    best_accumulate, its_efficiency = _best_accumulation(shape, network, nodes, per_node)
    samples = None if batch is None else DAY_S / mean_s * useful * batch * nodes * per_node
    return PredictedSize(
        nodes=nodes,
        ranks=nodes * per_node,
        step_s=(low_s, mean_s, high_s),
        efficiency=(min(1.0, alone_s / high_s), alone_s / mean_s, min(1.0, alone_s / low_s)),
        goodput=useful,
        communication_s=max(0.0, mean_s - alone_s - waiting_s),
        waiting_s=waiting_s,
        samples_per_day=samples,
        cost_per_day=None if options.price is None else options.price * nodes * 24,
        best_bucket_cap_mb=best_cap,
        best_bucket_step_s=best_s,
        best_accumulate=best_accumulate,
        best_accumulate_efficiency=its_efficiency,
    )


def _resampled(
    shape: StepShape, network: Network, nodes: int, per_node: int
) -> tuple[float, float]:
    """The ends of 90% of the means of resampled steps."""
    draw = random.Random(0)  # noqa: S311 - a simulation, not a secret
    samples = (draw.choices(shape.paces, k=len(shape.paces)) for _ in range(REPLICATES))
    shapes = [replace(shape, paces=tuple(paces)) for paces in samples]
    cuts = quantiles(
        (typical_step_s(resampled, network, nodes, per_node) for resampled in shapes), n=20
    )
    return cuts[0], cuts[-1]


def _model_error(network: Network) -> float:
    return MODEL_ERROR if network.backend == "gloo" else NCCL_ERROR


def goodput(mean_s: float, nodes: int, options: ScaleOptions) -> float:
    """The part of the time that goes into steps that are kept. A failure of any node costs the
    restart and, on average, half of the steps between two checkpoints."""
    interval_s = options.checkpoint_every * mean_s
    saving = interval_s / (interval_s + options.checkpoint_pause_s)
    failures_per_s = nodes / (options.mtbf_hours * 3600)
    return saving * max(0.0, 1 - failures_per_s * (options.restart_s + interval_s / 2))


# What to change


def _best_bucket(
    shape: StepShape, network: Network, nodes: int, per_node: int
) -> tuple[float, float]:
    """The bucket size with the shortest step; of those that are as good, the nearest to DDP's own
    25 MiB."""
    caps = [
        cap for cap in BUCKET_CAPS_MB if shape.gradient_bytes <= cap * MIB * MAX_BUCKETS
    ] or BUCKET_CAPS_MB[-1:]
    candidates = (shape.with_bucket_cap(cap) for cap in caps)
    step_s_by_cap = {
        candidate.bucket_cap_mb: typical_step_s(candidate, network, nodes, per_node)
        for candidate in candidates
    }
    good = [
        cap
        for cap, seconds in step_s_by_cap.items()
        if seconds <= min(step_s_by_cap.values()) * 1.005
    ]
    best = min(good, key=lambda cap: abs(math.log(cap / 25.0)))
    return best, step_s_by_cap[best]


def _best_accumulation(
    shape: StepShape, network: Network, nodes: int, per_node: int
) -> tuple[int, float]:
    candidates = [
        shape,
        *(shape.with_accumulation(count) for count in ACCUMULATIONS if count > shape.accumulate),
    ]
    for candidate in candidates:
        efficiency = candidate.alone_s / typical_step_s(candidate, network, nodes, per_node)
        if efficiency >= WANTED_EFFICIENCY:
            break
    return candidate.accumulate, efficiency


def _stops_paying(shape: StepShape, network: Network, options: ScaleOptions) -> int | None:
    """The first number of nodes after which an added node brings too little, on the way to the
    largest by doubling."""
    sizes = sorted(
        {*options.nodes, *(1 << power for power in range(max(options.nodes).bit_length()))}
    )
    steps = [typical_step_s(shape, network, nodes, options.gpus_per_node) for nodes in sizes]
    rates = [
        goodput(seconds, nodes, options) * nodes / seconds
        for seconds, nodes in zip(steps, sizes, strict=True)
    ]
    for number in range(1, len(sizes)):
        gain = (rates[number] - rates[number - 1]) / (sizes[number] - sizes[number - 1])
        if gain < options.pays_above * rates[0]:
            return sizes[number - 1]
    return None
