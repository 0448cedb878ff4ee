"""What a job would reach on other numbers of nodes: step time, efficiency, goodput and cost, from a profile, a network
and the simulation of steps. No torch.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from statistics import quantiles

from drumline.scale.network_model import Network
from drumline.scale.profile_result import ProfileResult
from drumline.scale.scaling_result import PredictedSize, Prediction
from drumline.scale.simulation import StepShape, shape_of, step_s, typical_step_s
from drumline.text import MIB

MODEL_ERROR = 0.121
"""The worst error of the grid in docs/scaling.md (`make bench-scale`)."""
BUCKET_CAPS_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
WANTED_EFFICIENCY = 0.90
MAX_BUCKETS = 2000
REPLICATES, DAYS = 40, 200
MANY_FAILURES = 500.0
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """The flags of `scale predict`."""

    nodes: tuple[int, ...]
    per_node: int
    bucket_cap_mb: float | None = None
    accumulate: int | None = None
    checkpoint_every: int = 1000
    checkpoint_pause_s: float = 0.0
    mtbf_hours: float = 6300.0
    restart_s: float = 120.0
    price: float | None = None
    pays_above: float = 0.5
    seed: int = 0


def predict(profile: ProfileResult, network: Network, options: ScaleOptions, *, source: str) -> Prediction:
    """From the profile of one job. The same seed gives the same result."""
    shape = shape_of(profile)
    if options.accumulate is not None:
        shape = shape.with_accumulation(options.accumulate)
    measured = shape
    if options.bucket_cap_mb is not None:
        shape = shape.with_bucket_cap(options.bucket_cap_mb)
    batch = None if profile.batch_size is None else profile.batch_size / profile.world_size
    batch = batch and batch * shape.accumulate / max(1, profile.accumulate)
    sizes = tuple(_size(shape, measured, network, options, nodes, batch) for nodes in sorted(set(options.nodes)))
    return Prediction(
        made_at=time.time(),
        task=profile.task,
        device=profile.device,
        backend=network.backend,
        profile=source,
        profile_ranks=profile.world_size,
        batch_per_rank=batch,
        bucket_cap_mb=options.bucket_cap_mb or profile.bucket_cap_mb,
        accumulate=shape.accumulate,
        network=network.between.name,
        network_source=network.between.source,
        inside=network.inside.name,
        inside_source=network.inside.source,
        alone_s=shape.alone_s,
        checkpoint_every=options.checkpoint_every,
        checkpoint_pause_s=options.checkpoint_pause_s,
        mtbf_hours=options.mtbf_hours,
        restart_s=options.restart_s,
        price=options.price,
        model_error=MODEL_ERROR,
        stops_paying=_stops_paying(shape, network, options),
        pays_above=options.pays_above,
        sizes=sizes,
    )


def _size(
    shape: StepShape, measured: StepShape, network: Network, options: ScaleOptions, nodes: int, batch: float | None
) -> PredictedSize:
    per_node, ranks = options.per_node, nodes * options.per_node
    mean_s = step_s(shape, network, nodes, per_node)
    low_s, high_s = _interval(shape, network, nodes, options)
    useful, low_useful, high_useful = goodput(mean_s, nodes, options)
    # Of the time over that of a rank alone, what remains on a network that takes no time is the wait for a rank.
    waiting_s = max(0.0, step_s(shape, _instant(network), nodes, per_node) - shape.alone_s)
    best_cap, best_s = _best_bucket(measured, network, nodes, per_node)
    best_accumulate, its_efficiency = _best_accumulation(shape, network, nodes, per_node)
    steps = DAY_S / mean_s * useful
    return PredictedSize(
        nodes=nodes,
        ranks=ranks,
        step_s=mean_s,
        low_step_s=low_s,
        high_step_s=high_s,
        efficiency=shape.alone_s / mean_s,
        low_efficiency=min(1.0, shape.alone_s / high_s),
        high_efficiency=min(1.0, shape.alone_s / low_s),
        communication_s=max(0.0, mean_s - shape.alone_s - waiting_s),
        waiting_s=waiting_s,
        goodput=useful,
        low_goodput=low_useful,
        high_goodput=high_useful,
        steps_per_day=steps,
        samples_per_day=None if batch is None else steps * batch * ranks,
        cost_per_day=None if options.price is None else options.price * nodes * 24,
        best_bucket_cap_mb=best_cap,
        best_bucket_step_s=best_s,
        best_accumulate=best_accumulate,
        best_accumulate_efficiency=its_efficiency,
    )


def _interval(shape: StepShape, network: Network, nodes: int, options: ScaleOptions) -> tuple[float, float]:
    """90% of the means of resampled compute times, and the model's error on both sides."""
    draw = random.Random(options.seed)  # noqa: S311 - a simulation, not a secret
    again = (sorted(draw.choices(shape.spread, k=len(shape.spread))) for _ in range(REPLICATES))
    shapes = [replace(shape, spread=tuple(one)) for one in again]
    means = [typical_step_s(one, network, nodes, options.per_node) for one in shapes]
    cuts = quantiles(means, n=20)
    return cuts[0] * (1 - MODEL_ERROR), cuts[-1] * (1 + MODEL_ERROR)


def _instant(network: Network) -> Network:
    """The same without communication."""
    links = (replace(link, bytes_per_s=math.inf, latency_s=0.0, rates=()) for link in (network.between, network.inside))
    between, inside = links
    return Network(backend="gloo", between=between, inside=inside)


# Failures and checkpoints


def goodput(mean_s: float, nodes: int, options: ScaleOptions) -> tuple[float, float, float]:
    """The part of a day that goes into steps that are kept: its mean, and 90% of days. A failure of any node costs the
    restart, and half of the steps between two checkpoints."""
    interval_s = options.checkpoint_every * mean_s
    saving = interval_s / (interval_s + options.checkpoint_pause_s)
    failures = DAY_S / 3600 * nodes / options.mtbf_hours
    mean = saving * max(0.0, 1 - failures * (options.restart_s + interval_s / 2) / DAY_S)
    if failures > MANY_FAILURES:
        return mean, mean, mean
    draw = random.Random(options.seed)  # noqa: S311
    days = []
    for _ in range(DAYS):
        lost = sum(options.restart_s + draw.random() * interval_s for _ in range(_poisson(draw, failures)))
        days.append(saving * max(0.0, 1 - lost / DAY_S))
    cuts = quantiles(days, n=20)
    return mean, min(mean, cuts[0]), max(mean, cuts[-1])


def _poisson(draw: random.Random, mean: float) -> int:
    count, product, limit = 0, draw.random(), math.exp(-mean)
    while product > limit:
        count, product = count + 1, product * draw.random()
    return count


# What to change


def _best_bucket(measured: StepShape, network: Network, nodes: int, per_node: int) -> tuple[float, float]:
    """The bucket size with the shortest step; of equal ones, the nearest to DDP's own 25 MiB."""
    caps = [cap for cap in BUCKET_CAPS_MB if measured.num_bytes <= cap * MIB * MAX_BUCKETS]
    found = {cap: typical_step_s(measured.with_bucket_cap(cap), network, nodes, per_node) for cap in caps}
    shortest = min(found.values())
    good = [cap for cap in caps if found[cap] <= shortest * 1.005]
    best = min(good, key=lambda cap: abs(math.log(cap / 25.0)))
    return best, found[best]


def _best_accumulation(shape: StepShape, network: Network, nodes: int, per_node: int) -> tuple[int, float]:
    for count in (one for one in ACCUMULATIONS if one >= shape.accumulate):
        tried = shape.with_accumulation(count)
        efficiency = tried.alone_s / typical_step_s(tried, network, nodes, per_node)
        if efficiency >= WANTED_EFFICIENCY:
            break
    else:
        count = max(shape.accumulate, ACCUMULATIONS[-1])
    return count, efficiency


def _stops_paying(shape: StepShape, network: Network, options: ScaleOptions) -> int | None:
    """The first number of nodes after which an added node brings too little, on the way to the largest by doubling."""
    largest = max(options.nodes)
    sizes = sorted({*options.nodes, *(1 << power for power in range(largest.bit_length()))})
    rates = [_kept_steps_per_s(shape, network, nodes, options) * nodes for nodes in sizes]
    one = rates[0] / sizes[0]
    for number in range(1, len(sizes)):
        gain = (rates[number] - rates[number - 1]) / (sizes[number] - sizes[number - 1]) / one
        if gain < options.pays_above:
            return sizes[number - 1]
    return None


def _kept_steps_per_s(shape: StepShape, network: Network, nodes: int, options: ScaleOptions) -> float:
    mean_s = typical_step_s(shape, network, nodes, options.per_node)
    return goodput(mean_s, nodes, options)[0] / mean_s
