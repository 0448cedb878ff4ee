"""When the gradients of a step are ready to be reduced: DDP's buckets, from the traces of all
ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from drumline.runs.profile_files import RankFacts
from drumline.runs.profile_result import Bucket, sent_part
from drumline.tools.profile.breakdown import MatchedCollective
from drumline.tools.profile.intervals import clipped, length, union
from drumline.tools.profile.trace_file import CollectiveCall, RankTrace, TraceStep


class BucketTimes(NamedTuple):
    """A bucket in one step of one rank."""

    num_bytes: float
    ready_s: float
    backward_s: float
    reduce_s: float


def buckets_of(
    facts: Mapping[int, RankFacts],
    traces: Mapping[int, RankTrace],
    collectives: Sequence[MatchedCollective],
) -> list[Bucket]:
    """The n-th all-reduce of gradients in each step that has as many of them as most."""
    rows: list[list[BucketTimes]] = []
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
            begin = backward_start(trace, step, calls)
            row = []
            for call, num_bytes in zip(calls, known_bytes, strict=True):
                ready_s = _computed_until(trace, step, call.host_call, call.start)
                before_s = 0.0 if begin is None else _computed_until(trace, step, begin, begin)
                row.append(
                    BucketTimes(
                        call.num_bytes or num_bytes,
                        ready_s,
                        max(0.0, ready_s - before_s),
                        reduced[id(call)],
                    )
                )
            rows.append(row)
    usual = statistics.mode(len(row) for row in rows)
    rows = [row for row in rows if len(row) == usual]
    return [_mean_bucket(times) for times in zip(*rows, strict=True)]


def _mean_bucket(times: Sequence[BucketTimes]) -> Bucket:
    mean = BucketTimes(*np.mean(np.array(times), axis=0).tolist())
    return Bucket(
        num_bytes=round(mean.num_bytes),
        ready_s=mean.ready_s,
        backward_s=mean.backward_s,
        reduce_s=mean.reduce_s,
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
    trace: RankTrace, step: TraceStep, calls: Sequence[CollectiveCall]
) -> float | None:
    """When the host began the backward pass in which gradients are reduced: after the last batch of
    the step."""
    if not calls or calls[0].host_call is None:
        return None
    before = trace.data[trace.data[:, 1] <= calls[0].host_call]
    since = before[-1, 1] if len(before) else step.start
    begun = trace.backward[
        (trace.backward[:, 1] > since) & (trace.backward[:, 0] <= calls[0].host_call)
    ]
    return float(begun[0, 0]) if len(begun) else None


def _computed_until(
    trace: RankTrace, step: TraceStep, host_time: float | None, start: float
) -> float:
    """How long the work of a step takes that the host had launched at this time; before `start`, if
    it is not known."""
    if host_time is None or not trace.is_device:
        return length(clipped(trace.compute, step.start, start if host_time is None else host_time))
    launches = trace.launches
    chosen = launches[
        (launches[:, 0] < host_time) & (launches[:, 1] >= step.start) & (launches[:, 1] < step.end)
    ]
    return length(union(chosen[:, 1:]))
