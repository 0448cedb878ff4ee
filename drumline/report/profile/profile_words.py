"""A profile in words: the largest loss first, then the parts of a step, the ranks, the buckets and
the kernels."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.base.terminal import one_line
from drumline.base.text import bit_rate, file_size, named_ranks, plural
from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import Advice, Bottleneck
from drumline.runs.profile_result import (
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
CROWDED = 0.02
"""A wait for a CPU of less than this part of the steps is not mentioned."""
MOST_NAME = 60
CAUSE_GAPS = ("slow_rank", "host_sync", "launches")
"""Bottlenecks of which gaps are a symptom."""


def words_of(result: ProfileResult) -> list[str]:
    """The lines to print."""
    return [
        *_heading(result),
        headline(result),
        "",
        *_parts(result),
        *_of_cpu_waits(result),
        *_of_ranks(result),
        *_of_buckets(result),
        *_of_syncs(result),
        *_of_kernels(result),
    ]


def _heading(result: ProfileResult) -> Iterator[str]:
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
    first = advice[0] if advice and advice[0].cost_s else None
    gaps_s = result.parts_s["gaps"]
    if first is None or (gaps_s > first.cost_s and first.bottleneck not in CAUSE_GAPS):
        if gaps_s < LITTLE * result.step_s:
            return f"the ranks compute {_share(result.parts_s['compute'], result)} of the step: there is little to gain"
        return f"the host is slow: {_share(gaps_s, result)} of the step neither computes nor waits (Python, launches)"
    return _sentence(first, result)


def _sentence(first: Advice, result: ProfileResult) -> str:
    share = _share(first.cost_s, result)
    slowest = max(result.ranks, key=lambda rank: rank.critical_steps)
    exposed = (
        f"communication is exposed: the ranks wait {share} of the step for all-reduces of gradients"
    )
    host = f"the host waits for the device, which is idle {share} of the step because of that{_source(result)}"
    sentences: dict[Bottleneck, str] = {
        "data": f"data is slow: the ranks wait {share} of the step for their batches",
        "bucket_size": f"{exposed}, in {plural(len(result.buckets), 'bucket')}",
        "network": exposed,
        "slow_rank": f"rank {slowest.rank} is slow: the others wait {share} of the step for it",
        "uneven_ranks": f"ranks wait for each other {share} of the step, and not always for the same one",
        "host_sync": host,
        "other_collectives": f"collectives besides the gradients' take {share} of the step",
        "launches": f"the host is slow: the device waits {share} of the step for its launches",
        "fp32": f"the ranks compute {_share(result.parts_s['compute'], result)} of the step",
    }
    return sentences[first.bottleneck]


def _parts(result: ProfileResult) -> Iterator[str]:
    yield f"{'an average step':<30} {_ms(result.step_s)}"
    order = sorted(PARTS[1:], key=lambda part: -result.parts_s[part])
    for part in ("compute", *order):
        if result.parts_s[part] > 0:
            yield f"  {PART_NAMES[part]:<28} {_ms(result.parts_s[part])}  {_share(result.parts_s[part], result):>4}"
    if result.world_size > 1:
        yield f"  beside compute: {_ms(result.hidden_communication_s).strip()} of communication, hidden"
    if result.unprofiled_step_s:
        slowdown = result.step_s / result.unprofiled_step_s - 1
        cost = f"{slowdown:.0%}" if slowdown > 0.005 else "nothing that shows"
        yield f"  a step without the profiler takes {_ms(result.unprofiled_step_s).strip()}: profiling costs {cost}"


def _of_cpu_waits(result: ProfileResult) -> Iterator[str]:
    crowded = most_crowded(result)
    if crowded is not None and crowded.part >= CROWDED:
        yield (
            f"rank {crowded.rank} on {one_line(crowded.host)} waited for a CPU in {crowded.part:.0%} of its steps: "
            "other processes used the cores, or ranks share them, and on a quiet machine the numbers differ"
        )


def _of_ranks(result: ProfileResult) -> Iterator[str]:
    critical = [rank for rank in result.ranks if rank.critical_steps]
    critical.sort(key=lambda rank: -rank.critical_steps)
    if result.world_size > 1 and critical:
        counts = ", ".join(
            f"rank {rank.rank} in {rank.critical_steps}" for rank in critical[:MOST_SHOWN]
        )
        yield f"the others wait for {counts} of {plural(result.num_steps, 'step')}"


def _of_buckets(result: ProfileResult) -> Iterator[str]:
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
            f"  {number}: {num_bytes:>8}, ready after {_ms(bucket.ready_s).strip()} of compute, "
            f"all-reduce {_ms(bucket.reduce_s).strip()}{_rate(bucket, result)}"
        )
    if len(result.buckets) > MOST_SHOWN:
        yield f"  and {len(result.buckets) - MOST_SHOWN} more"


def _rate(bucket: Bucket, result: ProfileResult) -> str:
    rate = bus_bytes_per_s([bucket], result.world_size)
    if not rate:
        return ""
    if not result.network_bytes_per_s:
        return f" at {bit_rate(rate)}"
    return f" at {bit_rate(rate)} ({rate / result.network_bytes_per_s:.0%} of the network's)"


def _of_syncs(result: ProfileResult) -> Iterator[str]:
    if result.syncs:
        yield ""
        yield "the host waits for the device in"
        for sync in result.syncs[:MOST_SHOWN]:
            yield f"  {_ms(sync.seconds)} {sync.calls:4.4g}x  {one_line(sync.source)} ({one_line(sync.call)})"


def _of_kernels(result: ProfileResult) -> Iterator[str]:
    if result.kernels:
        yield ""
        yield "most compute time is in"
        for kernel in result.kernels[:MOST_SHOWN]:
            name = one_line(kernel.name)
            short = name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..."
            yield f"  {_ms(kernel.seconds)} {kernel.calls:4.4g}x  {short}"


def _source(result: ProfileResult) -> str:
    located = [sync for sync in result.syncs if sync.source != "unknown"]
    return f", mostly in {one_line(located[0].source)}" if located else ""


def _share(seconds: float, result: ProfileResult) -> str:
    return f"{seconds / result.step_s:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:8.0f} ms"
