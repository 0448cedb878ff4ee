"""What slows a step down and what to change, from the numbers of a profile: the most expensive
bottleneck first, each with a prediction, its band and how it was derived. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from drumline.base.text import latency, plural
from drumline.report.profile.bottleneck import (
    CRITICAL_SHARE,
    MIN_GAIN,
    OWN_PARTS,
    USUAL_CORES,
    Advice,
    Savings,
    SlowRank,
    find_slow_rank,
    is_gpu,
    is_script,
    of_step,
)
from drumline.report.profile.communication_advice import (
    communication_rules,
    other_collectives_rules,
)
from drumline.runs.profile_result import ProfileResult

MAX_WORKERS = 16
WORKERS_PER_CORE = 4
MATRIX_KERNELS = re.compile(r"gemm|conv|cutlass|winograd|wgrad|dgrad|fprop|mma", re.IGNORECASE)
HALF_KERNELS = re.compile(r"fp?16|float16|half|_h\d*gemm", re.IGNORECASE)  # already in bf16 or fp16
# Of such kernels in bf16, as times of fp32.
USUAL_BF16_SPEED = 3.0
MOST_BF16_SPEED = 8.0
LEAST_BF16_SPEED = 1.2


def advise(result: ProfileResult) -> tuple[Advice, ...]:
    """The advice that promises more than MIN_GAIN of the step, the most expensive bottleneck
    first."""
    result = _without_profiler(result)
    rules = (_data, _ranks, communication_rules, other_collectives_rules, _device_idles, _fp32)
    advice_of_rules = [
        replace(item, step_s=result.step_s) for rule in rules for item in rule(result)
    ]
    least_s = MIN_GAIN * result.step_s
    worth = [advice for advice in advice_of_rules if advice.saved_s.likely > least_s]
    return tuple(sorted(worth, key=lambda advice: -advice.cost_s))


def _without_profiler(result: ProfileResult) -> ProfileResult:
    """On a GPU the profiler takes time from the host that launches kernels, so the device waits
    longer: the step and its gaps without that time."""
    gaps = result.parts_s["gaps"]
    unprofiled_s = result.unprofiled_step_s
    if not is_gpu(result) or unprofiled_s is None:
        return result
    extra = min(gaps, max(0.0, result.step_s - unprofiled_s))
    return replace(
        result, step_s=result.step_s - extra, parts_s={**result.parts_s, "gaps": gaps - extra}
    )


def _data(result: ProfileResult) -> Iterator[Advice]:
    """Several processes make several batches at once, as far as there are cores for what loading
    computes; the rest of the step remains."""
    step_s = result.step_s
    waited = result.parts_s["data"]
    if waited < MIN_GAIN * step_s:
        return
    working = step_s - waited
    workers = int(result.settings.get("data.workers", "0"))
    load_s = workers * step_s if workers else waited
    cores = result.cores_per_rank or USUAL_CORES
    load = result.loading_cores
    waits_for_storage = load is not None and load < 0.5
    most = max(1, min(MAX_WORKERS, int(cores * WORKERS_PER_CORE if waits_for_storage else cores)))
    num_workers = min(most, math.ceil(1.2 * load_s / max(working, 1e-9)))

    def saved(load: float) -> float:
        computing = 0.0 if is_gpu(result) else working
        return step_s - max(working, load_s / num_workers, (computing + load * load_s) / cores)

    text = f"a rank waits {of_step(result, waited)} for its batch"
    if workers:
        text += f", which {plural(workers, 'worker')} load"
    likely = saved(1.0 if load is None else min(1.0, load))
    settings: dict[str, str] | None = {"data.workers": str(num_workers)}
    most_s = saved(0.0) if load is None else likely + 0.1 * (step_s - likely)
    remedy = ""
    derivation = f"a batch takes {latency(load_s)} to load, {num_workers} at once; the rest takes {latency(working)}"
    if num_workers <= workers or likely < MIN_GAIN * step_s:
        on = f"{cores:.3g} core{'' if cores == 1 else 's'} a rank"  # ranks may share a core
        settings = None
        remedy = f"more workers bring nothing on {on}: store samples decoded and resized"
        likely = waited
    elif is_script(result):  # how many workers it has is not known
        settings = None
        remedy = f"raise num_workers of the DataLoader, up to {most}"
    if settings is None:
        most_s = waited
        derivation = "the step without the wait at best"
    yield Advice(
        bottleneck="data",
        text=text,
        remedy=remedy,
        settings=settings,
        cost_s=waited,
        saved_s=Savings(likely, most_s, 0.8 * likely if settings else 0.0),
        derivation=derivation,
    )


def _ranks(result: ProfileResult) -> Iterator[Advice]:
    """One rank for which the others wait, or ranks that are late in turn."""
    if len(result.ranks) < 2:
        return
    slow = find_slow_rank(result)
    yield _uneven_ranks(result) if slow is None else _slow_rank(result, slow)


def _uneven_ranks(result: ProfileResult) -> Advice:
    waiting = result.parts_s["waiting_for_rank"]
    late = max(result.ranks, key=lambda rank: rank.critical_steps)
    whom = "one another, and not always for the same rank"
    remedy = "give ranks batches of about the same cost"
    if late.critical_steps >= CRITICAL_SHARE * result.num_steps:
        whom = f"rank {late.rank} on {late.host}, whose own work takes no longer"
        remedy = "it joins collectives late: look for what else uses its device and its cores"
    return Advice(
        bottleneck="uneven_ranks",
        text=f"ranks wait {of_step(result, waiting)} for {whom}",
        remedy=f"{remedy}, and use hosts without other jobs",
        cost_s=waiting,
        saved_s=Savings(waiting / 2, waiting, 0.0),
        derivation="without any of the wait at best",
    )


def _slow_rank(result: ProfileResult, slow: SlowRank) -> Advice:
    rank = slow.steps
    usual = {part: median(peer.parts_s[part] for peer in slow.peers) for part in OWN_PARTS}
    part = max(OWN_PARTS, key=lambda name: rank.parts_s[name] - usual[name])
    return Advice(
        bottleneck="slow_rank",
        text=f"rank {rank.rank} on {rank.host} {OWN_PARTS[part]} {latency(rank.parts_s[part])} a step, the others "
        f"{latency(usual[part])}: they wait {of_step(result, slow.cost_s)} for it",
        remedy="look there for other jobs, thermal limits and slow storage (drumline doctor --hosts compares hosts); "
        "if its hardware is slower, --data.balance auto gives it fewer samples",
        cost_s=slow.cost_s,
        saved_s=Savings(slow.cost_s, slow.waited_s, slow.cost_s / 2),
        derivation=f"if it took as long as the others; all wait for it in {rank.critical_steps} of "
        f"{plural(result.num_steps, 'step')}",
    )


def _device_idles(result: ProfileResult) -> Iterator[Advice]:
    """A GPU idles while the host prepares its next kernels: a host that never waits for the device
    runs ahead of it, and a captured graph needs no host."""
    if not is_gpu(result):
        return
    step_s = result.step_s
    gaps = result.parts_s["gaps"]
    idle = gaps + result.parts_s["host_sync"]
    # Torch itself waits for events, in DDP's own timers: nobody can change that.
    syncs = [
        sync
        for sync in result.syncs
        if (sync.source, sync.call) != ("unknown", "cudaEventSynchronize")
    ]
    blocked = sum(sync.seconds for sync in syncs)
    gained = min(idle, blocked)
    can_capture = result.settings.get("dist.mode", "ddp") == "ddp"  # no sharded model
    if gained > max(MIN_GAIN * step_s, idle / 4):
        lines = ", ".join(
            f"{sync.source} ({sync.call}, {sync.calls:.3g} times)" for sync in syncs[:3]
        )
        yield Advice(
            bottleneck="host_sync",
            text=f"the device is idle {of_step(result, idle)}, and the host waits for it at {lines}",
            remedy="leave numbers on the device there, and read them every so many steps",
            cost_s=idle,
            saved_s=Savings(gained, idle, max(idle - gaps, gained / 3)),
            derivation=f"the device is busy for {latency(step_s - idle)} and the host for "
            f"{latency(step_s - blocked)}: the longer remains",
        )
    elif result.settings.get("train.step") not in ("graph", "compiled_graph") and can_capture:
        compiled = 'capture the step: torch.compile(mode="reduce-overhead")'
        yield Advice(
            bottleneck="launches",
            text=f"the device waits {of_step(result, gaps)} for the host to launch kernels",
            remedy=compiled if is_script(result) else "",
            settings=None if is_script(result) else {"train.step": "graph"},
            cost_s=gaps,
            saved_s=Savings(0.8 * gaps, gaps, gaps / 2),
            derivation="a captured step has few gaps between its kernels",
        )


def _fp32(result: ProfileResult) -> Iterator[Advice]:
    """No bottleneck, so it is last."""
    if not is_gpu(result) or result.precision not in (None, "fp32"):
        return
    products = [kernel for kernel in result.kernels if MATRIX_KERNELS.search(kernel.name)]
    seconds = sum(kernel.seconds for kernel in products if not HALF_KERNELS.search(kernel.name))
    saved_s = Savings(
        likely=seconds * (1 - 1 / USUAL_BF16_SPEED),
        most=seconds * (1 - 1 / MOST_BF16_SPEED),
        least=seconds * (1 - 1 / LEAST_BF16_SPEED),
    )
    yield Advice(
        bottleneck="fp32",
        text=f"matrix products and convolutions compute {of_step(result, seconds)}",
        remedy="in fp32, use torch.autocast(dtype=torch.bfloat16)"
        if is_script(result)
        else "compare the losses",
        settings=None if is_script(result) else {"train.precision": "bf16"},
        cost_s=0.0,
        saved_s=saved_s,
        derivation=f"they are {LEAST_BF16_SPEED:g} to {MOST_BF16_SPEED:g} times as fast in bf16",
    )
