"""A profile in words: the largest loss first, then the parts of a step, the ranks, the buckets and
the kernels."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.base.text import bit_rate, file_size, named_ranks, one_line, plural, two_digits
from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import Advice, Bottleneck, at_line, find_slow_rank
from drumline.runs.profile_result import (
    CROWDED,
    PART_NAMES,
    PARTS,
    Bucket,
    ProfileResult,
    bus_bytes_per_s,
    most_crowded,
)

MOST_SHOWN = 5
LITTLE = 0.05
"""A loss of less than this part of the step is not worth a change."""
SHORT = 0.01
"""Phases and lines of less than this part of the step are not shown."""
MOST_NAME = 60
FEW_STEPS = 20
"""The percentile of fewer steps says nothing."""


def words_of(result: ProfileResult) -> list[str]:
    """The lines to print."""
    return [
        *_heading(result),
        headline(result),
        "",
        *_parts(result),
        *_of_all_steps(result),
        *_utilization(result),
        *_phases(result),
        *_lines(result),
        *_of_cpu_waits(result),
        *_of_ranks(result),
        *_of_buckets(result),
        *_of_syncs(result),
        *_of_kernels(result),
    ]


def _heading(result: ProfileResult) -> Iterator[str]:
    """What was profiled, and which ranks are missing."""
    last = result.first_step + result.num_steps - 1
    nodes = "" if result.num_nodes == 1 else f" on {plural(result.num_nodes, 'node')}"
    backend = f", {one_line(result.backend)}" if result.world_size > 1 else ""
    yield (
        f"profile of {one_line(result.task)}: steps {result.first_step} to {last}, "
        f"{plural(result.world_size, 'rank')}{nodes}, {one_line(result.device)}{backend}"
    )
    if result.missing_ranks:
        ranks = sorted(int(rank) for rank in result.missing_ranks)
        why = one_line(next(iter(result.missing_ranks.values())))
        yield f"no trace of {named_ranks(ranks)} ({why}): the numbers are of the other ranks"


def headline(result: ProfileResult) -> str:
    """The largest loss of an average step."""
    advice = advise(result)
    largest = max(advice, key=lambda item: item.cost_s, default=None)
    if largest is not None and largest.cost_s:
        return _sentence(largest, result)

    compute = f"the ranks compute {_share(result.parts_s['compute'], result)} of the step"
    gaps_s = result.parts_s["gaps"]
    if gaps_s >= LITTLE * result.step_s:
        compute += f", and {_share(gaps_s, result)} is Python and launches"
    return f"{compute}; there is nothing worth changing" if not advice else compute


def _sentence(largest: Advice, result: ProfileResult) -> str:
    """The largest loss in a sentence."""
    share = f"{largest.cost_s / largest.step_s:.0%}"
    slowest = find_slow_rank(result)
    slow = "a rank" if slowest is None else f"rank {slowest.steps.rank}"
    exposed = (
        f"communication is exposed: the ranks wait {share} of the step for all-reduces of gradients"
    )
    host = f"the host waits for the device, which is idle {share} of the step because of that{_source(result)}"
    sentences: dict[Bottleneck, str] = {
        "data": f"data is slow: the ranks wait {share} of the step for their batches",
        "bucket_size": f"{exposed}, in {plural(len(result.buckets), 'bucket')}",
        "network": exposed,
        "slow_rank": f"{slow} is slow: the others wait {share} of the step for it",
        "uneven_ranks": f"ranks wait for each other {share} of the step, and not always for the same one",
        "host_sync": host,
        "launches": f"the host is slow: the device waits {share} of the step for its launches",
        "python": f"the host is slow: a function of yours takes {share} of the step",
        "workers": f"there are too many workers: the ranks wait {share} of the step for a core",
        "thread": f"another thread computes in Python: the steps wait {share} of their time for it",
    }
    name = largest.bottleneck.replace("_", " ")
    return sentences.get(largest.bottleneck, f"{share} of the step goes to {name}")


def _parts(result: ProfileResult) -> Iterator[str]:
    """The parts of a step, the longest after computing first."""
    yield f"{'an average step':<30} {_ms(result.step_s):>11}"
    order = sorted(PARTS[1:], key=lambda part: -result.parts_s[part])
    for part in ("compute", *order):
        if result.parts_s[part] > 0:
            yield f"  {PART_NAMES[part]:<28} {_ms(result.parts_s[part]):>11}  {_share(result.parts_s[part], result):>4}"

    if result.world_size > 1:
        yield f"  beside compute: {_ms(result.hidden_communication_s)} of communication, hidden"
    if result.unprofiled_step_s:
        slowdown = result.step_s / result.unprofiled_step_s - 1
        cost = f"{slowdown:.0%}" if slowdown > 0.005 else "nothing that shows"
        yield f"  a step without the profiler takes {_ms(result.unprofiled_step_s)}: profiling costs {cost}"


def _of_all_steps(result: ProfileResult) -> Iterator[str]:
    """Profiled steps may all be short where now and then one is not."""
    times = result.run_steps
    if times is None or times.count < FEW_STEPS:
        return

    yield (
        f"  of {times.count:,} steps since the start (evaluations and saves left out): median "
        f"{_ms(times.median_s)}, 99th percentile {_ms(times.p99_s)}"
    )
    if times.stalls:
        longest = times.longest[0]
        yield (
            f"  {plural(times.stalls, 'stall')} of more than twice the median took "
            f"{times.stalled_part:.1%} of the time, the longest {_ms(longest.seconds)} "
            f"(step {longest.step})"
        )


def _utilization(result: ProfileResult) -> Iterator[str]:
    """The MFU, by the time of a step without the profiler where it is known."""
    if result.step_tflop is None:
        return

    tflop_per_s = result.step_tflop / (result.unprofiled_step_s or result.step_s)
    of_peak = ""
    if result.peak_tflop_per_s:
        share = tflop_per_s / result.peak_tflop_per_s
        of_peak = f", {share:.1%} of the {result.peak_tflop_per_s:,.0f} of its devices (MFU)"

    yield f"  the model computes {two_digits(tflop_per_s)} TFLOP/s{of_peak}"


def _phases(result: ProfileResult) -> Iterator[str]:
    """Short phases are one line."""
    if not result.phases_s:
        return

    yield ""
    yield "the same step by phase"
    shown = [
        (name, seconds)
        for name, seconds in result.phases_s.items()
        if seconds >= SHORT * result.step_s and name != "rest"
    ]
    rest_s = result.step_s - sum(seconds for _, seconds in shown)
    for name, seconds in [*shown, ("rest", max(0.0, rest_s))]:
        yield f"  {one_line(name):<28} {_ms(seconds):>11}  {_share(seconds, result):>4}"
    for reason, seconds in result.pauses_s.items():
        yield f"  on top, for {reason}s: {_ms(seconds)} a step"


def _lines(result: ProfileResult) -> Iterator[str]:
    """The user's lines, where they run Python or wait."""
    lines = [line for line in result.lines if line.own_s >= SHORT * result.step_s]
    if lines:
        yield ""
        yield "your own Python takes"
    for line in sorted(lines, key=lambda line: -line.own_s)[:MOST_SHOWN]:
        yield f"  {_ms(line.own_s):>11}  {line.phase}: {at_line(line)}"


def _of_cpu_waits(result: ProfileResult) -> Iterator[str]:
    """A rank that waited for a CPU, if one did for long."""
    crowded = most_crowded(result)
    if crowded is not None and crowded.part >= CROWDED:
        yield (
            f"rank {crowded.rank} on {one_line(crowded.host)} waited for a CPU in {crowded.part:.0%} of its steps: "
            "other processes used the cores, or ranks share them, and on a quiet machine the numbers differ"
        )


def _of_ranks(result: ProfileResult) -> Iterator[str]:
    """For which ranks the others wait."""
    late = [(sum(rank.waited_for_s) / result.num_steps, rank) for rank in result.ranks]
    late.sort(key=lambda row: -row[0])
    waits = ", ".join(
        f"{_ms(seconds)} a step for rank {rank.rank} (in {rank.critical_steps} of "
        f"{plural(result.num_steps, 'step')})"
        for seconds, rank in late[:MOST_SHOWN]
        if seconds >= SHORT * result.step_s
    )
    if result.world_size > 1 and waits:
        yield f"the others wait {waits}"


def _of_buckets(result: ProfileResult) -> Iterator[str]:
    """The buckets with their all-reduces."""
    if not result.buckets:
        return

    total = sum(bucket.num_bytes for bucket in result.buckets)
    measured = result.network_bytes_per_s
    yield ""
    against = "" if measured is None else f"; doctor measured {bit_rate(measured)}"
    size = f"{file_size(total)} a step" if total else "of unknown bytes"
    yield f"{plural(len(result.buckets), 'bucket')} of gradients, {size}{against}"

    for number, bucket in enumerate(result.buckets[:MOST_SHOWN], 1):
        num_bytes = file_size(bucket.num_bytes) if total else "?"
        yield (
            f"  {number}: {num_bytes:>8}, ready after {_ms(bucket.ready_s)} of compute, "
            f"all-reduce {_ms(bucket.reduce_s)}{_rate(bucket, result)}"
        )

    if len(result.buckets) > MOST_SHOWN:
        yield f"  and {len(result.buckets) - MOST_SHOWN} more"


def _rate(bucket: Bucket, result: ProfileResult) -> str:
    """The bandwidth of an all-reduce, and how much of the measured one that is."""
    rate = bus_bytes_per_s([bucket], result.world_size)
    if not rate:
        return ""
    if not result.network_bytes_per_s:
        return f" at {bit_rate(rate)}"
    return f" at {bit_rate(rate)} ({rate / result.network_bytes_per_s:.0%} of the network's)"


def _of_syncs(result: ProfileResult) -> Iterator[str]:
    """The lines at which the host waits for the device."""
    if result.syncs:
        yield ""
        yield "the host waits for the device in"
        for sync in result.syncs[:MOST_SHOWN]:
            yield f"  {_ms(sync.seconds):>11} {sync.calls:4.4g}x  {one_line(sync.source)} ({one_line(sync.call)})"


def _of_kernels(result: ProfileResult) -> Iterator[str]:
    """The operations that compute longest."""
    if result.kernels:
        yield ""
        yield "most compute time is in"
        for kernel in result.kernels[:MOST_SHOWN]:
            name = one_line(kernel.name)
            short = name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..."
            yield f"  {_ms(kernel.seconds):>11} {kernel.calls:4.4g}x  {short}"


def _source(result: ProfileResult) -> str:
    """The line of the longest sync whose line is known."""
    located = [sync for sync in result.syncs if sync.source != "unknown"]
    return f", mostly in {one_line(located[0].source)}" if located else ""


def _share(seconds: float, result: ProfileResult) -> str:
    """A part of the step, in percent."""
    return f"{seconds / result.step_s:.0%}"


def _ms(seconds: float) -> str:
    """`4.20 ms`, `120 ms`."""
    return f"{seconds * 1e3:.{2 if seconds < 0.1 else 0}f} ms"
