"""From the traces of a profile to its result: reads RUN/profile, and writes profile.json and the merged trace."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from drumline.errors import UsageError
from drumline.scale.breakdown import MatchedCollective, StepParts, clock_shifts, divide_steps, matched
from drumline.scale.intervals import clipped, length, union
from drumline.scale.merged_trace import write_merged
from drumline.scale.profile_result import PARTS, Bucket, HostSync, Kernel, ProfileResult, RankSteps, write_profile
from drumline.scale.trace_file import CollectiveCall, RankTrace, TraceStep, read_trace, shifted
from drumline.terminal import one_line
from drumline.watch.profile_files import PROFILE_FOLDER, RankFacts, facts_path, read_facts, trace_path

MOST_KERNELS, MOST_SYNCS, MOST_RANKS = 15, 10, 4096
LINE_AFTER_S = 1.0
"""How long after a host sync its source line may be recorded."""


def analyse(run: Path, *, network_bytes_per_s: float | None = None) -> ProfileResult:
    """The result of the traces in a run folder, which is also written there."""
    facts, traces, missing = read_ranks(run / PROFILE_FOLDER)
    hosts = {rank: one.host for rank, one in facts.items()}
    shifts = clock_shifts(traces, hosts)
    aligned = {rank: shifted(trace, shifts[rank]) for rank, trace in traces.items()}
    result = result_of(facts, aligned, missing, network_bytes_per_s)
    write_merged(run / PROFILE_FOLDER, hosts, shifts)
    write_profile(run, result)
    return result


def read_ranks(folder: Path) -> tuple[dict[int, RankFacts], dict[int, RankTrace], dict[int, str]]:
    """The facts and traces that can be read; and for each other rank, why its own cannot."""
    facts: dict[int, RankFacts] = {}
    traces: dict[int, RankTrace] = {}
    missing: dict[int, str] = {}
    world_size = 1
    rank = 0
    while rank < min(world_size, MOST_RANKS):
        try:
            facts[rank] = read_facts(folder, rank)
            world_size = max(world_size, facts[rank].world_size)
            trace = with_sources(read_trace(trace_path(folder, rank)), facts[rank])
            traces[rank] = replace(trace, steps=counted_steps(trace.steps, facts[rank].left_out))
        except (OSError, ValueError) as error:
            missing[rank] = one_line(error)
            traces.pop(rank, None)
            if rank not in facts and not traces:
                world_size = max(world_size, rank + 2 if facts_path(folder, rank + 1).exists() else 0)
        rank += 1
    if not traces:
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in list(missing.items())[:4])
        raise UsageError(f"{folder} has no trace that can be read ({why})", next_step="profile the job again")
    return {rank: facts[rank] for rank in traces}, traces, missing


def counted_steps(steps: Sequence[TraceStep], left_out: Sequence[int]) -> tuple[TraceStep, ...]:
    """The steps without those that an evaluation or a save followed, unless no other is left."""
    if not steps:
        raise ValueError("it has no steps")
    return tuple(step for step in steps if step.number not in left_out) or tuple(steps)


def result_of(
    facts: Mapping[int, RankFacts],
    traces: Mapping[int, RankTrace],
    missing: Mapping[int, str],
    network_bytes_per_s: float | None = None,
) -> ProfileResult:
    """`traces` are by one clock."""
    collectives = matched(traces)
    divided = {rank: divide_steps(rank, trace, collectives) for rank, trace in traces.items()}
    critical = critical_ranks(divided)
    ranks = [_rank_steps(facts[rank], steps, critical.count(rank)) for rank, steps in divided.items()]
    first = facts[min(facts)]
    every = [one for steps in divided.values() for one in steps]
    unprofiled = [one.unprofiled_step_s for one in facts.values() if one.unprofiled_step_s is not None]
    return ProfileResult(
        task=first.job.task,
        world_size=first.world_size,
        num_nodes=len({one.host for one in facts.values()}),
        device=first.device,
        backend=first.backend,
        first_step=first.first_step,
        num_steps=min(len(steps) for steps in divided.values()),
        batch_size=first.job.batch_size,
        accumulate=first.job.accumulate,
        precision=first.job.precision,
        bucket_cap_mb=first.job.bucket_cap_mb,
        settings=first.job.settings,
        step_s=statistics.fmean(statistics.fmean(one.step_s) for one in ranks),
        parts_s={part: statistics.fmean(one.parts_s[part] for one in ranks) for part in PARTS},
        hidden_communication_s=statistics.fmean(one.hidden_communication_s for one in ranks),
        ranks=tuple(ranks),
        buckets=tuple(buckets_of(facts, traces, collectives)),
        other_collectives_s=statistics.fmean(one.other_s for one in every),
        other_collectives=statistics.fmean(one.num_other for one in every),
        kernels=tuple(top_kernels(traces.values())[:MOST_KERNELS]),
        syncs=tuple(host_syncs(traces.values())[:MOST_SYNCS]),
        network_bytes_per_s=network_bytes_per_s,
        unprofiled_step_s=statistics.fmean(unprofiled) if unprofiled else None,
        cores_per_rank=first.cores,
        loading_cores=first.loading_cores if first.job.settings.get("data.workers") == "0" else None,
        missing_ranks={str(rank): reason for rank, reason in missing.items()},
    )


def _rank_steps(facts: RankFacts, steps: Sequence[StepParts], num_critical: int) -> RankSteps:
    return RankSteps(
        rank=facts.rank,
        host=facts.host,
        step_s=tuple(one.step.end - one.step.start for one in steps),
        compute_s=tuple(one.parts_s["compute"] for one in steps),
        parts_s={part: statistics.fmean(one.parts_s[part] for one in steps) for part in PARTS},
        hidden_communication_s=statistics.fmean(one.hidden_s for one in steps),
        critical_steps=num_critical,
    )


def critical_ranks(divided: Mapping[int, Sequence[StepParts]]) -> list[int]:
    """For each step in which ranks waited, the one that they waited for longest."""
    found = []
    for steps in zip(*divided.values(), strict=False):
        waited: dict[int, float] = defaultdict(float)
        for one in steps:
            for last, seconds in one.waited_s.items():
                waited[last] += seconds
        if any(waited.values()):
            found.append(max(waited, key=lambda rank: waited[rank]))
    return found


# Buckets


def buckets_of(
    facts: Mapping[int, RankFacts], traces: Mapping[int, RankTrace], collectives: Sequence[MatchedCollective]
) -> list[Bucket]:
    """The n-th all-reduce of gradients in each step that has as many of them as most."""
    rows: list[list[tuple[int, float, float, float]]] = []
    for rank, trace in traces.items():
        reduced = {id(one.by_rank[rank]): one.reduce_s for one in collectives if rank in one.by_rank}
        halves = facts[rank].job.settings.get("dist.comm") in ("bf16", "fp16")
        sizes = [size // 2 if halves else size for size in facts[rank].bucket_bytes]
        for step in trace.steps:
            calls = bucket_calls(trace, step, len(sizes))
            known = sizes if len(sizes) == len(calls) else [0] * len(calls)
            begin = backward_start(trace, step, calls)
            row = []
            for one, num_bytes in zip(calls, known, strict=True):
                ready_s = _computed(trace, step, one)
                before_s = 0.0 if begin is None else _computed_until(trace, step, begin)
                row.append((one.num_bytes or num_bytes, ready_s, max(0.0, ready_s - before_s), reduced[id(one)]))
            rows.append(row)
    usual = statistics.mode(len(row) for row in rows)
    rows = [row for row in rows if len(row) == usual]
    means = [np.mean(np.array(column), axis=0) for column in zip(*rows, strict=True)]
    return [
        Bucket(num_bytes=round(n), ready_s=r, backward_s=b, reduce_s=s) for n, r, b, s in (m.tolist() for m in means)
    ]


def bucket_calls(trace: RankTrace, step: TraceStep, num_buckets: int) -> list[CollectiveCall]:
    """The all-reduces of gradients in a step. Those of a CUDA graph have no call on the host: if there are as many as
    DDP has buckets, they are these."""
    inside = [one for one in trace.collectives if step.start <= one.call < step.end]
    if found := [one for one in inside if one.is_bucket]:
        return found
    plain = [one for one in inside if one.host_call is None and one.kind.startswith("allreduce")]
    return plain if len(plain) == num_buckets else []


def backward_start(trace: RankTrace, step: TraceStep, calls: Sequence[CollectiveCall]) -> float | None:
    """When the host began the backward pass in which gradients are reduced: after the last batch of the step."""
    if not calls or calls[0].host_call is None:
        return None
    before = trace.data[trace.data[:, 1] <= calls[0].host_call]
    since = before[-1, 1] if len(before) else step.start
    begun = trace.backward[(trace.backward[:, 1] > since) & (trace.backward[:, 0] <= calls[0].host_call)]
    return float(begun[0, 0]) if len(begun) else None


def _computed(trace: RankTrace, step: TraceStep, call: CollectiveCall) -> float:
    if call.host_call is None:
        return length(clipped(trace.compute, step.start, call.start))
    return _computed_until(trace, step, call.host_call)


def _computed_until(trace: RankTrace, step: TraceStep, host_time: float) -> float:
    """How long the work of a step takes that the host had launched at this time."""
    if not trace.is_device:
        return length(clipped(trace.compute, step.start, host_time))
    launches = trace.launches
    chosen = launches[(launches[:, 0] < host_time) & (launches[:, 1] >= step.start) & (launches[:, 1] < step.end)]
    return length(union(chosen[:, 1:]))


# Kernels and host synchronizations


def top_kernels(traces: Iterable[RankTrace]) -> list[Kernel]:
    """The longest first: means over steps and ranks."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    num_steps = 0
    for trace in traces:
        num_steps += len(trace.steps)
        for name, start, lasts in trace.operations:
            if _is_in_a_step(trace, start):
                seconds[name] += lasts
                calls[name] += 1
    found = [Kernel(name=name, seconds=seconds[name] / num_steps, calls=calls[name] / num_steps) for name in seconds]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _is_in_a_step(trace: RankTrace, when: float) -> bool:
    place = bisect_right(trace.steps, when, key=lambda step: step.start) - 1
    return place >= 0 and when < trace.steps[place].end


def host_syncs(traces: Iterable[RankTrace]) -> list[HostSync]:
    """The longest first: means over steps and ranks."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    num_steps = 0
    for trace in traces:
        num_steps += len(trace.steps)
        for event in trace.syncs:
            place = (event.details["source"], event.name)
            seconds[place] += event.end - event.start
            calls[place] += 1
    found = [
        HostSync(source=source, call=call, seconds=seconds[source, call] / num_steps, calls=count / num_steps)
        for (source, call), count in calls.items()
    ]
    return sorted(found, key=lambda sync: -sync.seconds)


def with_sources(trace: RankTrace, facts: RankFacts) -> RankTrace:
    """The trace, with the source line of each host sync: torch reports it just after the call."""
    lines = [((when - trace.base_ns) / 1e9, place) for when, place in facts.sync_lines]
    named = []
    for event in trace.syncs:
        following = (place for when, place in lines if event.end <= when < event.end + LINE_AFTER_S)
        named.append(event._replace(details={"source": next(following, "unknown")}))
    return replace(trace, syncs=tuple(named))
