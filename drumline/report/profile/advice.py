"""What slows a step down and what to change, from the numbers of a profile: the most expensive
bottleneck first, each with a prediction, its band and how it was derived. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from drumline.base.text import join_names, latency, one_line, plural
from drumline.report.profile.arithmetic_advice import ARITHMETIC_RULES
from drumline.report.profile.bottleneck import (
    CRITICAL_SHARE,
    MIN_GAIN,
    MIN_UNCERTAIN,
    OWN_PARTS,
    Advice,
    Savings,
    SlowRank,
    at_sampled,
    blame,
    by_setting,
    crowding_s,
    find_slow_rank,
    is_gpu,
    mostly_at,
    of_step,
    removable,
    slower_line,
)
from drumline.report.profile.communication_advice import COMMUNICATION_RULES
from drumline.report.profile.data_advice import DATA_RULES
from drumline.report.profile.host_advice import HOST_RULES, loops_between_phases_s
from drumline.runs.profile_files import ALLOCATIONS, CLIPPING, FIRST_WITH_COST
from drumline.runs.profile_result import HostSync, LineCost, ProfileResult, RankSteps

MOST_NAMED_SYNCS = 3
OF_KERNEL_SEARCH = ("unknown", "cudaDeviceSynchronize")
"""The line and the call: torch reports none for what cuDNN does, and for some others."""
MANY_TRIALS = 10
"""Calls in a step: a search has tens."""
WITHOUT_MODES = "leave it out, or use it for some steps only"
CAPTURED = ("forward", "backward", CLIPPING, "optimizer", "rest")
"""The phases that a graph has."""
WITHOUT_GAPS = ("data", "waiting_for_rank", "exposed_communication")
USUAL_CALL_S = 0.1e-3
"""Of an operation that Python calls, with the Python of its module."""
ALLOCATION_REMEDY = (
    "leave torch.cuda.empty_cache() out of the step: torch keeps memory for the next one; where it is short of "
    "memory, use smaller micro-batches"
)


def advise(result: ProfileResult) -> tuple[Advice, ...]:
    """The advice that promises more than MIN_GAIN of the step, the most expensive bottleneck
    first. What changes the training is last, unless it is all that helps against that one."""
    result = _without_profiler(result)
    added_s = (result.slow_modes_s or 0.0) + sum(result.pauses_s.values())
    result = replace(result, step_s=result.step_s + added_s)
    rules = (
        _slow_modes,
        *DATA_RULES,
        _ranks,
        *COMMUNICATION_RULES,
        _device_idles,
        *(HOST_RULES if result.phases_s else ()),
        *ARITHMETIC_RULES,
    )
    advice_of_rules = [
        replace(item, step_s=result.step_s) for rule in rules for item in rule(result)
    ]
    worth = [advice for advice in advice_of_rules if _is_worth(advice)]
    largest_s = max((advice.cost_s for advice in worth), default=0.0)

    def place(advice: Advice) -> tuple[bool, float, bool]:
        is_last = advice.changes_training and advice.cost_s < largest_s
        return is_last, -advice.cost_s, advice.changes_training

    unmeasured = [replace(item, step_s=result.step_s) for item in _unmeasured_modes(result)]
    return (*sorted(worth, key=place), *unmeasured)


def _is_worth(advice: Advice) -> bool:
    """What may bring nothing has to cost more, and so has what changes the training, unless it is
    no bottleneck."""
    changes_training = advice.changes_training and advice.cost_s
    is_uncertain = changes_training or advice.saved_s.least <= 0
    least_cost = MIN_UNCERTAIN if is_uncertain else 0.0
    return (
        advice.saved_s.likely > MIN_GAIN * advice.step_s
        and advice.cost_s >= least_cost * advice.step_s
    )


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


def _slow_modes(result: ProfileResult) -> Iterator[Advice]:
    """What is off in the profiled steps, by what it takes of the others."""
    cost_s = result.slow_modes_s
    names = _names_of_modes(result)
    if names and cost_s is not None:
        yield removable(
            "slow_modes" if result.slow_modes else "own_profiler",
            f"{of_step(result, cost_s)} go to {names}, off in the profiled steps",
            WITHOUT_MODES,
            cost_s,
        )


def _unmeasured_modes(result: ProfileResult) -> Iterator[Advice]:
    """The same where too few steps had it: it is named whatever it takes."""
    names = _names_of_modes(result)
    if names and result.slow_modes_s is None:
        yield removable(
            "slow_modes" if result.slow_modes else "own_profiler",
            f"steps before the profiled ones had {names}, off in the profiled steps: the cost is not known",
            f"{WITHOUT_MODES}; to see the cost, profile later steps (from {FIRST_WITH_COST} on)",
            0.0,
        )


def _names_of_modes(result: ProfileResult) -> str:
    """The user's own profiler, anomaly detection, tracers; empty: there are none."""
    names = list(map(one_line, result.slow_modes))
    line = result.own_profiler
    if line is not None:
        where = f" at {at_sampled(line)}" if line.file else ""
        names.append(f"a profiler (torch.profiler{where})")
    return join_names(names)


def _ranks(result: ProfileResult) -> Iterator[Advice]:
    """One rank for which the others wait, or ranks that are late in turn."""
    if len(result.ranks) < 2:
        return
    slow = find_slow_rank(result)
    yield _uneven_ranks(result) if slow is None else _slow_rank(result, slow)


def _uneven_ranks(result: ProfileResult) -> Advice:
    """Advice against waits for ranks that are late in turn."""
    for_cores_s = fmean(crowding_s(rank, result) for rank in result.ranks)
    waiting = max(0.0, result.parts_s["waiting_for_rank"] - for_cores_s)
    late = max(result.ranks, key=lambda rank: blame(rank, result))
    whom = "one another, and not always for the same rank"
    remedy = "give ranks batches of about the same cost (of about the same length)"
    if blame(late, result) >= CRITICAL_SHARE:
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
    """Advice against a rank whose own work takes longer."""
    rank = slow.steps
    usual = {part: median(peer.parts_s[part] for peer in slow.peers) for part in OWN_PARTS}
    part = max(OWN_PARTS, key=lambda name: rank.parts_s[name] - usual[name])
    line = slower_line(slow)
    remedy = (
        "look there for other jobs, thermal limits and slow storage (drumline doctor --hosts compares hosts); "
        "if its hardware is slower, --data.balance auto gives it fewer samples"
    )
    if line is not None:
        remedy = "the other ranks do not run this line for as long: find out why this one does"

    return Advice(
        bottleneck="slow_rank",
        text=f"rank {rank.rank} on {rank.host} {OWN_PARTS[part]} {latency(rank.parts_s[part])} a step"
        f"{mostly_at(line)}, the others {latency(usual[part])}: they wait {of_step(result, slow.cost_s)} for it",
        remedy=remedy,
        cost_s=slow.cost_s,
        saved_s=Savings(slow.cost_s, slow.waited_s, slow.cost_s / 2),
        derivation=f"if it took as long as the others; they wait for it in {_late_steps(rank)} of "
        f"{plural(result.num_steps, 'step')}",
    )


def _late_steps(rank: RankSteps) -> int:
    """In how many steps the others waited for it, and not for a moment only."""
    if not rank.waited_for_s:
        return rank.critical_steps
    return sum(seconds > max(rank.waited_for_s) / 4 for seconds in rank.waited_for_s)


def _device_idles(result: ProfileResult) -> Iterator[Advice]:
    """A GPU idles while the host prepares its next kernels: a host that never waits for the device
    runs ahead of it, and a captured graph needs no host."""
    if not is_gpu(result):
        return

    step_s = result.step_s
    gaps = result.parts_s["gaps"]
    capturable_s = gaps * _capturable_part(result)
    idle = gaps + result.parts_s["host_sync"]
    searches = _kernel_searches(result)
    if searches:
        yield _kernel_search(result, searches)
        idle = max(gaps, idle - _seconds(searches))

    # Torch itself waits for events, in DDP's own timers: nobody can change that.
    of_torch = ("unknown", "cudaEventSynchronize")
    syncs = [sync for sync in result.syncs if (sync.source, sync.call) != of_torch]
    syncs = [sync for sync in syncs if sync not in searches]
    waits = [sync for sync in syncs if sync.call not in ALLOCATIONS]
    # Memory that is only taken is kept, and soon there is enough.
    is_returned = any(sync.call == "cudaFree" for sync in syncs)
    returns_most = is_returned and _seconds(_allocations(syncs)) > _seconds(waits)
    syncs = _allocations(syncs) if returns_most else waits
    blocked = _seconds(syncs)
    gained = min(idle, blocked)
    # No sharded model, and no shapes that change from step to step.
    can_capture = result.settings.get("dist.mode", "ddp") == "ddp" and not searches

    if gained > max(MIN_GAIN * step_s, idle / 4):
        yield Advice(
            bottleneck="host_sync",
            text=f"the device is idle {of_step(result, idle)}, {_what_the_host_does(result, syncs)}",
            remedy=ALLOCATION_REMEDY
            if returns_most
            else "leave numbers on the device there, and read them every so many steps",
            cost_s=idle,
            saved_s=Savings(gained, idle, max(idle - gaps, gained / 3)),
            derivation=f"the device is busy for {latency(step_s - idle)} and the host for "
            f"{latency(step_s - blocked)}: the longer remains",
        )
    elif result.settings.get("train.step") not in ("graph", "compiled_graph") and can_capture:
        yield Advice(
            bottleneck="launches",
            text=f"the device waits {of_step(result, capturable_s)} for the host to launch kernels",
            **by_setting(
                result,
                {"train.step": "graph"},
                script='capture the step: torch.compile(mode="reduce-overhead")',
            ),
            cost_s=capturable_s,
            saved_s=Savings(0.8 * capturable_s, capturable_s, capturable_s / 2),
            derivation="a captured step has few gaps between its kernels",
        )


def _kernel_searches(result: ProfileResult) -> list[HostSync]:
    """cuDNN tries its kernels for each new shape, and waits for the device before and behind each:
    tens of calls, which have no line. Steps with the shapes of those before have none of it."""
    if not result.searches_kernels:
        return []

    waits = [sync for sync in result.syncs if (sync.source, sync.call) == OF_KERNEL_SEARCH]
    are_many = sum(sync.calls for sync in waits) >= MANY_TRIALS
    return waits if are_many and _seconds(waits) >= MIN_GAIN * result.step_s else []


def _kernel_search(result: ProfileResult, searches: Sequence[HostSync]) -> Advice:
    searched_s = _seconds(searches)
    idle_s = result.parts_s["gaps"] + result.parts_s["host_sync"]
    calls = sum(sync.calls for sync in searches)
    return Advice(
        bottleneck="kernel_search",
        text=f"cuDNN tries its kernels {of_step(result, searched_s)}, as it does for each new shape: "
        f"torch.backends.cudnn.benchmark is on, and {calls:.3g} calls of no line of yours wait for the device",
        **by_setting(
            result,
            {"train.cudnn_benchmark": "false"},
            script="pad to a few fixed shapes, or torch.backends.cudnn.benchmark = False",
            task="or pad to a few fixed shapes",
        ),
        cost_s=searched_s,
        saved_s=Savings(searched_s, max(searched_s, idle_s), searched_s / 3),
        derivation="a step with known shapes",
    )


def _capturable_part(result: ProfileResult) -> float:
    """How much of the host's time that may have gaps is in what a graph has; 1 if phases are not
    known."""
    all_s = sum(result.phases_s.values()) - sum(result.parts_s[part] for part in WITHOUT_GAPS)
    captured_s = sum(result.phases_s.get(phase, 0.0) for phase in CAPTURED)
    captured_s -= loops_between_phases_s(result)
    captured_s -= sum(_python_s(line) for line in result.lines if line.phase in CAPTURED)
    return min(1.0, max(0.0, captured_s) / all_s) if all_s > 0 else 1.0


def _python_s(line: LineCost) -> float:
    """What a line computes or waits besides calling operations, which a graph cannot have."""
    calls_s = (line.operations + line.library_operations) * USUAL_CALL_S
    return max(0.0, line.own_s - calls_s)


def _seconds(syncs: Iterable[HostSync]) -> float:
    return sum(sync.seconds for sync in syncs)


def _allocations(syncs: Iterable[HostSync]) -> list[HostSync]:
    return [sync for sync in syncs if sync.call in ALLOCATIONS]


def _what_the_host_does(result: ProfileResult, syncs: Sequence[HostSync]) -> str:
    """While the device is idle."""
    if allocations := _allocations(syncs):
        calls = " and ".join(f"{sync.call} ({sync.calls:.3g} times)" for sync in allocations)
        empty_cache_lines = [line for line in result.lines if "empty_cache" in line.text]
        return (
            f"and the host takes memory from CUDA and returns it: {calls}"
            f"{mostly_at(next(iter(empty_cache_lines), None))}"
        )
    lines = [
        f"{sync.source} ({sync.call}, {sync.calls:.3g} times)" for sync in syncs[:MOST_NAMED_SYNCS]
    ]
    return f"and the host waits for it at {', '.join(lines)}"
