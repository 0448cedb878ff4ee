"""When the gradients of a step are ready to be reduced: DDP's buckets and the tensors in them, and
what kept a rank from its work until then, from the traces of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, mode
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.base.text import MIB
from drumline.report.profile.bucket_plan import FIRST_BYTES, filled
from drumline.runs.profile_files import RankFacts
from drumline.runs.profile_result import Bucket, GradientTensor, sent_part
from drumline.tools.profile.breakdown import MatchedCollective
from drumline.tools.profile.intervals import (
    Intervals,
    clipped,
    difference,
    length,
    length_until,
    union,
)
from drumline.tools.profile.trace_file import CollectiveCall, RankTrace, TraceStep

Seconds = NDArray[np.float64]

# The host


def host_intervals(trace: RankTrace, num_buckets: int) -> Intervals:
    """When a rank neither computed nor waited for data or other ranks. No rank waits for buckets
    before the last one is ready: until then their all-reduces run beside what the host does."""
    rest = difference(union((step.start, step.end) for step in trace.steps), trace.compute)
    rest = difference(rest, trace.data)
    waits = []
    for step in trace.steps:
        buckets = bucket_calls(trace, step, num_buckets)
        of_buckets = {id(call) for call in buckets}
        waits += [
            (call.call, call.end)
            for call in trace.collectives
            if step.start <= call.call < step.end and id(call) not in of_buckets
        ]
        if buckets:
            last_end = max(call.end for call in buckets)
            waits.append((ready_instant(trace, step, buckets[-1]), last_end))

    return difference(rest, union(waits))


def ready_instant(trace: RankTrace, step: TraceStep, call: CollectiveCall) -> float:
    """When the gradients of a bucket were ready: when it was called or, on a device, when the
    kernels that were launched before had ended."""
    if call.host_call is None:
        return call.start
    [ready] = _computed_at(trace, step, np.array([call.host_call]))
    return float(ready)


def _computed_at(trace: RankTrace, step: TraceStep, host_times: Seconds) -> Seconds:
    """When what the host had launched at each of these times in a step was computed."""
    if not trace.is_device:
        return host_times
    of_step = _launches_of(trace, step)
    of_step = of_step[np.argsort(of_step[:, 0])]
    computed = np.maximum.accumulate([step.start, *of_step[:, 2]])
    until: Seconds = computed[np.searchsorted(of_step[:, 0], host_times)]
    return until


# Buckets


def buckets_of(
    facts: Mapping[int, RankFacts],
    traces: Mapping[int, RankTrace],
    collectives: Sequence[MatchedCollective],
    hosts: Mapping[int, Intervals],
) -> list[Bucket]:
    """The n-th all-reduce of gradients in each step that has as many of them as most. `hosts`: the
    `host_intervals` of each rank."""
    rows: list[list[Bucket]] = []
    for rank, trace in traces.items():
        reduced = {
            id(collective.by_rank[rank]): collective.reduce_s
            for collective in collectives
            if rank in collective.by_rank
        }
        part = sent_part(facts[rank].job.settings) or 0.0
        sizes = [round(size * part) for size in facts[rank].bucket_bytes]
        for step in trace.steps:
            calls = bucket_calls(trace, step, len(sizes))
            known_bytes = sizes if len(sizes) == len(calls) else [0] * len(calls)
            before_s = _before_backward_s(trace, step, calls)
            row = []
            for call, num_bytes in zip(calls, known_bytes, strict=True):
                ready_s = _computed_until(trace, step, call.host_call, call.start)
                ready = ready_instant(trace, step, call)
                row.append(
                    Bucket(
                        num_bytes=call.num_bytes or num_bytes,
                        ready_s=ready_s,
                        backward_s=max(0.0, ready_s - before_s),
                        host_s=length(clipped(hosts[rank], step.start, ready)),
                        reduce_s=reduced[id(call)],
                    )
                )
            rows.append(row)

    usual = mode(len(row) for row in rows)
    usual_rows = [row for row in rows if len(row) == usual]
    return [_mean_bucket(buckets) for buckets in zip(*usual_rows, strict=True)]


def _mean_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """The same bucket in all steps of all ranks, as means."""
    return Bucket(
        num_bytes=round(fmean(bucket.num_bytes for bucket in buckets)),
        ready_s=fmean(bucket.ready_s for bucket in buckets),
        backward_s=fmean(bucket.backward_s for bucket in buckets),
        host_s=fmean(bucket.host_s or 0.0 for bucket in buckets),
        reduce_s=fmean(bucket.reduce_s for bucket in buckets),
    )


def bucket_calls(trace: RankTrace, step: TraceStep, num_buckets: int) -> list[CollectiveCall]:
    """The all-reduces of gradients in a step. Those of a CUDA graph have no call on the host: if
    there are as many as DDP has buckets, they are these."""
    inside = [call for call in trace.collectives if step.start <= call.call < step.end]
    if buckets := [call for call in inside if call.is_bucket]:
        return buckets
    plain = [
        call for call in inside if call.host_call is None and call.kind.startswith("allreduce")
    ]
    return plain if len(plain) == num_buckets else []


def backward_start(
    trace: RankTrace,
    step: TraceStep,
    calls: Sequence[CollectiveCall],
) -> float | None:
    """When the host began the backward pass in which gradients are reduced: after the last batch of
    the step."""
    if not calls or calls[0].host_call is None:
        return None

    first_call = calls[0].host_call
    starts, ends = trace.backward.T
    loaded = trace.data[trace.data[:, 1] <= first_call, 1]
    since = loaded[-1] if len(loaded) else step.start
    begun = starts[(ends > since) & (starts <= first_call)]
    return float(begun[0]) if len(begun) else None


def _before_backward_s(trace: RankTrace, step: TraceStep, calls: Sequence[CollectiveCall]) -> float:
    """What a rank has computed in a step before the backward pass that reduces gradients."""
    begin = backward_start(trace, step, calls)
    return 0.0 if begin is None else _computed_until(trace, step, begin, begin)


def _computed_until(
    trace: RankTrace,
    step: TraceStep,
    host_time: float | None,
    start: float,
) -> float:
    """How long the work of a step takes that the host had launched at this time; before `start`, if
    it is not known."""
    if host_time is None:
        return length(clipped(trace.compute, step.start, start))
    if not trace.is_device:
        return length(clipped(trace.compute, step.start, host_time))
    of_step = _launches_of(trace, step)
    return length(union(of_step[of_step[:, 0] < host_time, 1:]))


def _launches_of(trace: RankTrace, step: TraceStep) -> Intervals:
    """The kernels of a step, as rows of launch, start and end."""
    starts = trace.launches[:, 1]
    return trace.launches[(starts >= step.start) & (starts < step.end)]


# Tensors


class TensorTimes(NamedTuple):
    """A gradient in one step of one rank."""

    ready_s: float
    backward_s: float
    host_s: float


def tensors_of(
    facts: Mapping[int, RankFacts],
    traces: Mapping[int, RankTrace],
    buckets: Sequence[Bucket],
    hosts: Mapping[int, Intervals],
) -> list[GradientTensor]:
    """The gradients in the order in which DDP puts them into buckets; none where this order does
    not give the buckets that DDP made, as with parameters of several types."""
    sizes = facts[min(facts)].tensor_bytes
    if not _are_buckets_of(facts[min(facts)]):
        return []

    rows = [
        _tensor_row(trace, step, len(sizes), hosts[rank])
        for rank, trace in traces.items()
        for step in trace.steps
    ]
    rows = [row for row in rows if len(row)]
    times = np.mean(np.array(rows), axis=0).tolist() if rows else _between(sizes, buckets)

    return [
        GradientTensor(num_bytes=size, ready_s=ready_s, backward_s=backward_s, host_s=host_s)
        for size, (ready_s, backward_s, host_s) in zip(sizes, times, strict=True)
    ]


def _are_buckets_of(facts: RankFacts) -> bool:
    """Whether these tensors fill the buckets of DDP, whose first is smaller by default."""
    sizes = facts.tensor_bytes
    cap_bytes = int(facts.job.bucket_cap_mb * MIB)
    plans = [filled(sizes, cap_bytes, first_bytes=first) for first in (None, FIRST_BYTES)]
    return bool(sizes) and any(
        facts.bucket_bytes == tuple(sum(sizes[number] for number in bucket) for bucket in plan)
        for plan in plans
    )


def _tensor_row(trace: RankTrace, step: TraceStep, num_tensors: int, host: Intervals) -> Seconds:
    """The `TensorTimes` of the last backward pass; empty where the trace does not have it, as in a
    CUDA graph."""
    times = trace.gradients[(trace.gradients >= step.start) & (trace.gradients < step.end)]
    calls = bucket_calls(trace, step, 0)
    if not calls or len(times) < num_tensors or len(times) % num_tensors:
        return np.empty((0, 3))

    ready = _computed_at(trace, step, times[-num_tensors:])
    ready_s = _since(step.start, trace.compute, ready)
    backward_s = np.maximum(0.0, ready_s - _before_backward_s(trace, step, calls))
    return np.stack([ready_s, backward_s, _since(step.start, host, ready)], axis=1)


def _since(start: float, intervals: Intervals, times: Seconds) -> Seconds:
    """How much of the set is between the start and each of these times."""
    return length_until(intervals, times) - length_until(intervals, np.array([start]))


def _between(sizes: Sequence[int], buckets: Sequence[Bucket]) -> list[TensorTimes]:
    """Where tensors were not timed: in proportion to their bytes, between those of the buckets."""
    ends = np.cumsum(sizes)
    sent = np.cumsum([0, *(bucket.num_bytes for bucket in buckets)])
    bucket_ends = sent * ends[-1] / max(1, sent[-1])  # fewer bytes are sent where they are rounded

    first = buckets[0]
    rows = [(first.ready_s - first.backward_s, 0.0, first.host_s or 0.0)]
    for bucket in buckets:
        rows.append((bucket.ready_s, bucket.backward_s, bucket.host_s or 0.0))
    columns = [np.interp(ends, bucket_ends, times) for times in zip(*rows, strict=True)]
    return [TensorTimes(*times) for times in zip(*columns, strict=True)]
