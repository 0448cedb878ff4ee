"""What slows a step down and what to change, from the numbers of a profile: the most expensive bottleneck first, each
with a prediction, its band and how it was derived. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from drumline.scale.bucket_plan import exposed_by_cap, exposed_s, fit_costs
from drumline.scale.profile_result import ProfileResult, RankSteps, bus_bytes_per_s, sent_part
from drumline.text import bit_rate, file_size, latency, plural

Bottleneck = Literal[
    "data", "bucket_size", "network", "slow_rank", "uneven_ranks", "host_sync", "other_collectives", "launches", "fp32"
]
MIN_GAIN = 0.03
"""Advice that promises less of the step is not given."""
CRITICAL_SHARE = 0.8  # of the steps: the others wait for this one rank, not for whichever is late by chance
MAX_WORKERS, WORKERS_PER_CORE, USUAL_CORES = 16, 4, 8.0
MAX_ACCUMULATE = 8
ONE_CORE = 0.3  # of the work of a rank with one core: what threads of many all-reduces took from it, at most
SLOWER_LINK = 0.6  # of what doctor measured
OWN_PARTS = {"compute": "computes", "data": "waits for data", "host_sync": "waits for its device", "gaps": "is idle"}
MATRIX_KERNELS = re.compile(r"gemm|conv|cutlass|winograd|wgrad|dgrad|fprop|mma", re.IGNORECASE)
HALF_KERNELS = re.compile(r"fp?16|float16|half|_h\d*gemm", re.IGNORECASE)  # already in bf16 or fp16
BF16_SPEEDS = (3.0, 8.0, 1.2)  # of such kernels, as times of fp32: usual, most, least


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One bottleneck, and what to do about it."""

    bottleneck: Bottleneck
    text: str
    """What was measured."""
    remedy: str = ""
    """What to do where no setting does it, or what else to know."""
    settings: Mapping[str, str] | None = None
    """The settings to try; None: no setting changes it."""
    samples_factor: int = 1
    """With these settings a step has this many times the samples."""
    cost_s: float
    """What the bottleneck takes of a step."""
    step_s: float = 0.0
    """The step as it is, from the profile."""
    saved_s: tuple[float, float, float]
    """What the change should save of it: probably, at most, at least. With more samples: for as many as before."""
    derivation: str

    @property
    def predicted_step_s(self) -> float:
        return self.step_s - self.saved_s[0]

    @property
    def band(self) -> tuple[float, float]:
        """The shortest and the longest step that the prediction allows."""
        return self.step_s - max(self.saved_s[:2]), self.step_s - min(self.saved_s[::2])


def advise(result: ProfileResult) -> tuple[Advice, ...]:
    """The advice that promises more than MIN_GAIN of the step, the most expensive bottleneck first."""
    result = _without_profiler(result)
    rules = (_data, _ranks, _communication, _other_collectives, _device_idles, _fp32)
    found = [replace(advice, step_s=result.step_s) for rule in rules for advice in rule(result)]
    worth = [one for one in found if one.saved_s[0] > MIN_GAIN * result.step_s]
    return tuple(sorted(worth, key=lambda one: -one.cost_s))


def flags_of(settings: Mapping[str, str]) -> str:
    """`--data.workers 4`, `--no-dist.sync_batchnorm`."""
    words = {"true": "--{}", "false": "--no-{}"}
    return " ".join(words.get(value, f"--{{}} {value}").format(path) for path, value in settings.items())


def advice_lines(found: Sequence[Advice]) -> Iterator[str]:
    """The advice as numbered lines."""
    for number, one in enumerate(found, start=1):
        yield f"{number}. {one.bottleneck.replace('_', ' ')}: {one.text}"
        flags = f"try {flags_of(one.settings)}" if one.settings else ""
        yield f"   {'; '.join(filter(None, [flags, one.remedy]))}"
        low, high = map(latency, one.band)
        yield f"   should bring {latency(one.predicted_step_s)} a step ({low} to {high}): {one.derivation}"


def _of_step(result: ProfileResult, seconds: float) -> str:
    """`42 ms of each 60 ms step`."""
    return f"{latency(seconds)} of each {latency(result.step_s)} step"


def _is_script(result: ProfileResult) -> bool:
    return result.batch_size is None


def _is_gpu(result: ProfileResult) -> bool:
    return result.device != "cpu"


def _without_profiler(result: ProfileResult) -> ProfileResult:
    """On a GPU the profiler takes time from the host that launches kernels, so the device waits longer: the step and
    its gaps without that time."""
    gaps, unprofiled_s = result.parts_s["gaps"], result.unprofiled_step_s
    if not _is_gpu(result) or unprofiled_s is None:
        return result
    extra = min(gaps, max(0.0, result.step_s - unprofiled_s))
    return replace(result, step_s=result.step_s - extra, parts_s={**result.parts_s, "gaps": gaps - extra})


def _data(result: ProfileResult) -> Iterator[Advice]:
    """Several processes make several batches at once, as far as there are cores for what loading computes; the rest of
    the step remains."""
    step_s, waited = result.step_s, result.parts_s["data"]
    if waited < MIN_GAIN * step_s:
        return
    rest, workers = step_s - waited, int(result.settings.get("data.workers", "0"))
    load_s = workers * step_s if workers else waited
    cores, load = result.cores_per_rank or USUAL_CORES, result.loading_cores
    waits_for_storage = load is not None and load < 0.5
    most = max(1, min(MAX_WORKERS, int(cores * WORKERS_PER_CORE if waits_for_storage else cores)))
    wanted = min(most, math.ceil(1.2 * load_s / max(rest, 1e-9)))

    def saved(load: float) -> float:
        computing = 0.0 if _is_gpu(result) else rest
        return step_s - max(rest, load_s / wanted, (computing + load * load_s) / cores)

    text = f"a rank waits {_of_step(result, waited)} for its batch" + (
        f", which {plural(workers, 'worker')} load" if workers else ""
    )
    likely = saved(1.0 if load is None else min(1.0, load))
    settings: dict[str, str] | None = {"data.workers": str(wanted)}
    most_s, remedy = saved(0.0) if load is None else likely + 0.1 * (step_s - likely), ""
    derivation = f"a batch takes {latency(load_s)} to load, {wanted} at once; the rest takes {latency(rest)}"
    if wanted <= workers or likely < MIN_GAIN * step_s:
        on = f"{cores:.3g} core{'' if cores == 1 else 's'} a rank"  # ranks may share a core
        settings, remedy = None, f"more workers bring nothing on {on}: store samples decoded and resized"
        likely = waited
    elif _is_script(result):  # how many workers it has is not known
        settings, remedy = None, f"raise num_workers of the DataLoader, up to {most}"
    if settings is None:
        most_s, derivation = waited, "the step without the wait at best"
    yield Advice(
        bottleneck="data",
        text=text,
        remedy=remedy,
        settings=settings,
        cost_s=waited,
        saved_s=(likely, most_s, 0.8 * likely if settings else 0.0),
        derivation=derivation,
    )


def _busy_s(rank: RankSteps) -> float:
    """The step without what it spends in collectives."""
    return sum(rank.parts_s[part] for part in OWN_PARTS)


def _slow_rank(result: ProfileResult) -> tuple[RankSteps, float, float] | None:
    """The rank for which the others wait in most steps since its own work takes longer, what that costs, and their
    wait."""
    if len(result.ranks) < 2:  # one rank, or the only one whose trace can be read
        return None
    slow = max(result.ranks, key=lambda one: (one.critical_steps, _busy_s(one)))
    others = [one for one in result.ranks if one is not slow]
    waited = sum(one.parts_s["waiting_for_rank"] for one in others) / len(others)
    cost = min(_busy_s(slow) - median(map(_busy_s, others)), waited)
    if slow.critical_steps < CRITICAL_SHARE * result.num_steps or cost < MIN_GAIN * result.step_s:
        return None
    return slow, cost, waited


def _wait_in_collectives_s(result: ProfileResult) -> float:
    """The wait for other ranks that is not that for a slow one: each collective has a part of it."""
    return 0.0 if _slow_rank(result) else result.parts_s["waiting_for_rank"]


def _ranks(result: ProfileResult) -> Iterator[Advice]:
    """One rank for which the others wait, or ranks that are late in turn."""
    if len(result.ranks) < 2:
        return
    waiting = result.parts_s["waiting_for_rank"]
    found = _slow_rank(result)
    if found is None:
        late = max(result.ranks, key=lambda one: one.critical_steps)
        whom, remedy = "one another, and not always for the same rank", "give ranks batches of about the same cost"
        if late.critical_steps >= CRITICAL_SHARE * result.num_steps:
            whom = f"rank {late.rank} on {late.host}, whose own work takes no longer"
            remedy = "it joins collectives late: look for what else uses its device and its cores"
        yield Advice(
            bottleneck="uneven_ranks",
            text=f"ranks wait {_of_step(result, waiting)} for {whom}",
            remedy=f"{remedy}, and use hosts without other jobs",
            cost_s=waiting,
            saved_s=(waiting / 2, waiting, 0.0),
            derivation="without any of the wait at best",
        )
        return
    slow, cost, waited = found
    others = [one for one in result.ranks if one is not slow]
    usual = {part: median(one.parts_s[part] for one in others) for part in OWN_PARTS}
    part = max(OWN_PARTS, key=lambda name: slow.parts_s[name] - usual[name])
    yield Advice(
        bottleneck="slow_rank",
        text=f"rank {slow.rank} on {slow.host} {OWN_PARTS[part]} {latency(slow.parts_s[part])} a step, the others "
        f"{latency(usual[part])}: they wait {_of_step(result, cost)} for it",
        remedy="look there for other jobs, thermal limits and slow storage (drumline doctor --hosts compares hosts); "
        "if its hardware is slower, --data.balance auto gives it fewer samples",
        cost_s=cost,
        saved_s=(cost, waited, cost / 2),
        derivation=f"if it took as long as the others; all wait for it in {slow.critical_steps} of "
        f"{plural(result.num_steps, 'step')}",
    )


def _exposed_s(result: ProfileResult) -> tuple[float, float]:
    """The exposed communication of gradients, and of other collectives: by the time that each kind is open outside of
    compute, since the parts do not tell them apart."""
    exposed, others = result.parts_s["exposed_communication"], result.other_collectives_s
    of_buckets = max(0.0, sum(bucket.reduce_s for bucket in result.buckets) - result.hidden_communication_s)
    share = of_buckets / (of_buckets + others) if others else 1.0
    return exposed * share, exposed * (1 - share)


def _communication(result: ProfileResult) -> Iterator[Advice]:
    """Another bucket size against latency, fewer bytes against bandwidth, fewer all-reduces against both."""
    exposed, _ = _exposed_s(result)
    if result.buckets and exposed:
        found = [_fewer_all_reduces(result, exposed)]
        if all(bucket.num_bytes for bucket in result.buckets):
            found = [*_fewer_bytes(result, exposed), *found, *_other_bucket_size(result, exposed)]
        # What changes the training less is first where it brings about as much.
        yield from sorted(found, key=lambda one: -one.saved_s[0] * (3 if one.samples_factor == 1 else 1))


def _other_bucket_size(result: ProfileResult, exposed: float) -> Iterator[Advice]:
    """The size with the least exposed time, if it is not the present one."""
    part = sent_part(result.settings)
    if part is None:
        return
    buckets, step_s, total = result.buckets, result.step_s, sum(bucket.reduce_s for bucket in result.buckets)
    costs = fit_costs(buckets, network_bytes_per_s=result.network_bytes_per_s, world_size=result.world_size)
    now = exposed_s([(bucket.reduce_s, bucket.backward_s) for bucket in buckets])
    scale = min(1.0, exposed / now) if now else 1.0  # gloo reduces several buckets at once, which the queue does not
    plans = [list(exposed_by_cap(buckets, part, cost)) for cost in costs]
    best = min(range(len(plans[0])), key=lambda index: (round(plans[0][index][1] / step_s, 2), index))
    cap, left, planned_s = plans[0][best]
    if cap == result.bucket_cap_mb:
        return
    saved = [exposed - min(exposed, plan[best][1] * scale) for plan in plans]
    # On the CPU all-reduces take time from the computing that hides them, and where a rank has one core, from the rest.
    freed = 0.0 if _is_gpu(result) else max(0.0, min(result.hidden_communication_s, total - planned_s))
    if not _is_gpu(result) and (result.cores_per_rank or USUAL_CORES) < 2 and planned_s < total / 2:
        freed += ONE_CORE * (result.parts_s["compute"] + result.parts_s["gaps"])
    fewer = 1 - min(1.0, planned_s / max(total, 1e-12))
    waiting = fewer * _wait_in_collectives_s(result)
    each = f", {latency(costs[0].latency_s)} of each latency" if len(costs) == 1 else ""
    yield Advice(
        bottleneck="bucket_size" if saved[0] > exposed / 2 else "network",
        text=f"{_of_step(result, exposed)} is exposed communication, in {plural(len(buckets), 'bucket')} of "
        f"{file_size(sum(one.num_bytes for one in buckets) / len(buckets))}",
        remedy=f"pass bucket_cap_mb={cap:g} to DistributedDataParallel" if _is_script(result) else "",
        settings=None if _is_script(result) else {"dist.bucket_cap_mb": f"{cap:g}"},
        cost_s=exposed,
        saved_s=(saved[0] + (freed + waiting) / 2, max(saved) + freed + waiting, 0.7 * min(saved)),
        derivation=f"all-reduces take {latency(total)}{each}; in buckets of {cap:g} MB {latency(planned_s)}, "
        f"{latency(left * scale)} of it exposed" + (", and less waiting in them" if waiting else ""),
    )


def _on_network(result: ProfileResult, exposed: float) -> str:
    size, speed = sum(one.num_bytes for one in result.buckets), bus_bytes_per_s(result.buckets, result.world_size)
    sent = f": {file_size(size)} of gradients at {bit_rate(speed)}" if size else ""
    return f"{_of_step(result, exposed)} is exposed communication{sent}"


def _fewer_bytes(result: ProfileResult, exposed: float) -> Iterator[Advice]:
    """Gradients in half the bytes."""
    if _is_script(result) or result.settings.get("dist.comm", "none") != "none":
        return
    costs = fit_costs(result.buckets, network_bytes_per_s=result.network_bytes_per_s, world_size=result.world_size)
    saved = [sum(min(one.reduce_s, cost.s_per_byte * one.num_bytes / 2) for one in result.buckets) for cost in costs]
    likely = min(exposed, saved[0])
    yield Advice(
        bottleneck="network",
        text=_on_network(result, exposed),
        remedy="gradients are rounded to bf16 before they are added: compare the losses",
        settings={"dist.comm": "bf16"},
        cost_s=exposed,
        saved_s=(0.8 * likely, min(exposed, max(saved)), 0.4 * min(likely, *saved)),
        derivation=f"half the bytes save {latency(saved[0])} of the all-reduces, less the time for rounding",
    )


def _fewer_all_reduces(result: ProfileResult, exposed: float) -> Advice:
    """One all-reduce for several times as many samples."""
    speed, doctors = bus_bytes_per_s(result.buckets, result.world_size), result.network_bytes_per_s
    factor = 2
    while factor < MAX_ACCUMULATE and exposed / factor > 0.1 * (result.step_s - exposed):
        factor *= 2
    remedies = ["the learning rate may have to follow the larger batch"]
    if _is_script(result):
        remedies = [
            f"accumulate {factor} times the samples with no_sync()",
            "or halve the bytes: model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        ]
    if doctors and 0 < speed < SLOWER_LINK * doctors:
        remedies.append(f"doctor measured {bit_rate(doctors)}: look for what else uses the link")
    elif result.num_nodes > 1 and not doctors:
        remedies.append("drumline doctor --hosts measures the link")
    fewer = 1 - 1 / factor
    saved, waiting = fewer * exposed, fewer * _wait_in_collectives_s(result)
    return Advice(
        bottleneck="network",
        text=_on_network(result, exposed),
        remedy="; ".join(remedies),
        settings=None if _is_script(result) else _larger_batch(result, factor),
        samples_factor=factor,
        cost_s=exposed,
        saved_s=(saved + waiting / 2, min(1.3 * saved, exposed) + waiting, 0.6 * saved),
        derivation=f"one all-reduce for {factor} times the samples; the time is for as many samples as now",
    )


def _larger_batch(result: ProfileResult, factor: int) -> dict[str, str]:
    path = "train.batch_size_per_rank" if "train.batch_size_per_rank" in result.settings else "train.batch_size"
    changed = {path: str(int(result.settings.get(path, result.batch_size or 1)) * factor)}
    if "train.micro_batch_size" not in result.settings:
        changed["train.accumulate"] = str(result.accumulate * factor)
    return changed


def _other_collectives(result: ProfileResult) -> Iterator[Advice]:
    """SyncBatchNorm, buffers, a user's own."""
    _, exposed = _exposed_s(result)
    is_sync = result.settings.get("dist.sync_batchnorm") == "true"
    waiting = min(result.parts_s["waiting_for_rank"], max(0.0, result.other_collectives_s - exposed))
    remedy = "call collectives less often; SyncBatchNorm has two in each layer"
    if is_sync:
        remedy = "BatchNorm then has the samples of one rank: at least 16 of them, or use GroupNorm"
    yield Advice(
        bottleneck="other_collectives",
        text=f"{_of_step(result, exposed + waiting)} is in {result.other_collectives:.0f} collectives besides the "
        f"all-reduces of gradients{' (SyncBatchNorm)' if is_sync else ''}",
        remedy=remedy,
        settings={"dist.sync_batchnorm": "false"} if is_sync else None,
        cost_s=exposed + waiting,
        saved_s=(exposed + waiting / 2, exposed + waiting, exposed / 2),
        derivation="without them, and without half to all of the wait for other ranks in them",
    )


def _device_idles(result: ProfileResult) -> Iterator[Advice]:
    """A GPU idles while the host prepares its next kernels: a host that never waits for the device runs ahead of it,
    and a captured graph needs no host."""
    if not _is_gpu(result):
        return
    step_s, gaps = result.step_s, result.parts_s["gaps"]
    idle = gaps + result.parts_s["host_sync"]
    # Torch itself waits for events, in DDP's own timers: nobody can change that.
    syncs = [one for one in result.syncs if (one.source, one.call) != ("unknown", "cudaEventSynchronize")]
    blocked = sum(sync.seconds for sync in syncs)
    gained = min(idle, blocked)
    if gained > max(MIN_GAIN * step_s, idle / 4):
        lines = ", ".join(f"{one.source} ({one.call}, {one.calls:.3g} times)" for one in syncs[:3])
        yield Advice(
            bottleneck="host_sync",
            text=f"the device is idle {_of_step(result, idle)}, and the host waits for it at {lines}",
            remedy="leave numbers on the device there, and read them every so many steps",
            cost_s=idle,
            saved_s=(gained, idle, max(idle - gaps, gained / 3)),
            derivation=f"the device is busy for {latency(step_s - idle)} and the host for "
            f"{latency(step_s - blocked)}: the longer remains",
        )
    elif result.settings.get("train.step") not in ("graph", "compiled_graph"):
        compiled = 'capture the step: torch.compile(mode="reduce-overhead")'
        yield Advice(
            bottleneck="launches",
            text=f"the device waits {_of_step(result, gaps)} for the host to launch kernels",
            remedy=compiled if _is_script(result) else "",
            settings=None if _is_script(result) else {"train.step": "graph"},
            cost_s=gaps,
            saved_s=(0.8 * gaps, gaps, gaps / 2),
            derivation="a captured step has few gaps between its kernels",
        )


def _fp32(result: ProfileResult) -> Iterator[Advice]:
    """No bottleneck, so it is last."""
    if not _is_gpu(result) or result.precision not in (None, "fp32"):
        return
    products = [one for one in result.kernels if MATRIX_KERNELS.search(one.name)]
    seconds = sum(one.seconds for one in products if not HALF_KERNELS.search(one.name))
    usual, most, least = (seconds * (1 - 1 / speed) for speed in BF16_SPEEDS)
    yield Advice(
        bottleneck="fp32",
        text=f"matrix products and convolutions compute {_of_step(result, seconds)}",
        remedy="in fp32, use torch.autocast(dtype=torch.bfloat16)" if _is_script(result) else "compare the losses",
        settings=None if _is_script(result) else {"train.precision": "bf16"},
        cost_s=0.0,
        saved_s=(usual, most, least),
        derivation=f"they are {BF16_SPEEDS[2]:g} to {BF16_SPEEDS[1]:g} times as fast in bf16",
    )
