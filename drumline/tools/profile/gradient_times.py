"""When the gradients of a step are ready to be reduced: DDP's buckets and the tensors in them, and
what kept a rank from its work until then, from the traces of all ranks.

On this the prediction of other numbers of ranks (tools/scale/) is built: a bucket is ready after so
many seconds of computing and so many of the host, whatever the network then does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, mode

import numpy as np

from drumline.base.text import MIB
from drumline.report.profile.bucket_plan import FIRST_BYTES, filled
from drumline.runs.profile_files import RankFacts
from drumline.runs.profile_result import Bucket, GradientTensor, sent_part
from drumline.tools.profile.breakdown import MatchedCollective
from drumline.tools.profile.intervals import (
    Intervals,
    Mask,
    Numbers,
    clipped,
    difference,
    length,
    length_until,
    union,
)
from drumline.tools.profile.rank_trace import (
    CollectiveCall,
    RankTrace,
    TracesByRank,
    TraceStep,
    spans,
)

# The host


def host_intervals(trace: RankTrace, num_buckets: int) -> Intervals:
    """When a rank neither computed nor waited for data or other ranks: its Python kept it from its work.

    No rank waits for buckets before the last one is ready: until then their all-reduces run beside what
    the host does."""
    waits = []
    for step in trace.steps:
        buckets = bucket_calls(trace, step, num_buckets)
        for call in calls_of(trace, step):
            if call not in buckets:
                waits.append((call.call, call.end))

        if buckets:
            last_ready = ready_instant(trace, step, buckets[-1])
            last_end = max(call.end for call in buckets)
            waits.append((last_ready, last_end))

    idle = difference(spans(trace.steps), trace.compute)
    idle = difference(idle, trace.data)
    return difference(idle, union(waits))


def calls_of(trace: RankTrace, step: TraceStep) -> list[CollectiveCall]:
    """The collectives that a rank joins in a step."""
    return [call for call in trace.collectives if step.start <= call.call < step.end]


def ready_instant(trace: RankTrace, step: TraceStep, call: CollectiveCall) -> float:
    """When the gradients of a bucket were ready: when it was called or, on a device, when the
    kernels that were launched before had ended."""
    if call.host_call is None:
        return call.start

    [ready] = _computed_at(trace, step, np.array([call.host_call]))
    return float(ready)


def _computed_at(trace: RankTrace, step: TraceStep, host_times: Numbers) -> Numbers:
    """When what the host had launched at each of these times in a step was computed: on the CPU at
    once, on a device when the kernels that were launched until then have ended."""
    if not trace.is_device:
        return host_times

    kernels = trace.launches[_is_in_step(trace.launches[:, 1], step)]
    by_launch = np.argsort(kernels[:, 0])
    launches, _, ends = kernels[by_launch].T

    # The n-th: when the first n kernels that were launched have ended.
    computed = np.maximum.accumulate([step.start, *ends])
    num_launched = np.searchsorted(launches, host_times)
    until: Numbers = computed[num_launched]

    return until


# Buckets


def buckets_of(
    facts: Mapping[int, RankFacts],
    traces: TracesByRank,
    collectives: Sequence[MatchedCollective],
    hosts: Mapping[int, Intervals],
) -> list[Bucket]:
    """The n-th all-reduce of gradients in each step that has as many of them as most.

    `hosts`: the `host_intervals` of each rank."""
    steps: list[list[Bucket]] = []
    for rank, trace in traces.items():
        of_rank = [collective for collective in collectives if rank in collective.by_rank]
        reduce_s = {collective.by_rank[rank]: collective.reduce_s for collective in of_rank}
        part = sent_part(facts[rank].job.settings) or 0.0
        sizes = [round(size * part) for size in facts[rank].bucket_bytes]

        for step in trace.steps:
            steps.append(_step_buckets(trace, step, sizes, reduce_s, hosts[rank]))

    usual_number = mode(len(buckets) for buckets in steps)
    usual_steps = [buckets for buckets in steps if len(buckets) == usual_number]
    return [_mean_bucket(same_bucket) for same_bucket in zip(*usual_steps, strict=True)]


def _step_buckets(
    trace: RankTrace,
    step: TraceStep,
    sizes: Sequence[int],
    reduce_s: Mapping[CollectiveCall, float],
    host: Intervals,
) -> list[Bucket]:
    """The buckets of one step of one rank.

    `sizes`: their bytes, where the trace does not have them; `reduce_s`: of each all-reduce."""
    calls = bucket_calls(trace, step, len(sizes))
    if len(sizes) != len(calls):
        sizes = [0] * len(calls)

    before_s = _before_backward_s(trace, step, calls)
    buckets = []
    for call, num_bytes in zip(calls, sizes, strict=True):
        ready = ready_instant(trace, step, call)
        ready_s = length(clipped(trace.compute, step.start, ready))
        buckets.append(
            Bucket(
                num_bytes=call.num_bytes or num_bytes,
                ready_s=ready_s,
                backward_s=max(0.0, ready_s - before_s),
                host_s=length(clipped(host, step.start, ready)),
                reduce_s=reduce_s[call],
            )
        )

    return buckets


def _mean_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """The same bucket in all steps of all ranks, as means."""
    num_bytes = round(fmean(bucket.num_bytes for bucket in buckets))
    times = ("ready_s", "backward_s", "host_s", "reduce_s")
    means = {name: fmean(getattr(bucket, name) for bucket in buckets) for name in times}

    return Bucket(num_bytes=num_bytes, **means)


def bucket_calls(trace: RankTrace, step: TraceStep, num_buckets: int) -> list[CollectiveCall]:
    """The all-reduces of gradients in a step. Those of a CUDA graph have no call on the host: if
    there are as many as DDP has buckets, they are these."""
    calls = calls_of(trace, step)
    if buckets := [call for call in calls if call.is_bucket]:
        return buckets

    reductions = [call for call in calls if call.kind.startswith("allreduce")]
    of_graph = [call for call in reductions if call.host_call is None]
    return of_graph if len(of_graph) == num_buckets else []


def _before_backward_s(trace: RankTrace, step: TraceStep, calls: Sequence[CollectiveCall]) -> float:
    """What a rank has computed in a step before the backward pass that reduces gradients: after the
    last batch of the step."""
    if not calls or calls[0].host_call is None:
        return 0.0

    first_call = calls[0].host_call
    load_ends = trace.data[:, 1]
    load_ends = load_ends[load_ends <= first_call]
    last_load = load_ends[-1] if len(load_ends) else step.start

    starts, ends = trace.backward.T
    starts = starts[(ends > last_load) & (starts <= first_call)]
    if not len(starts):
        return 0.0

    [begin] = _computed_at(trace, step, starts[:1])
    return length(clipped(trace.compute, step.start, begin))


def _is_in_step(times: Numbers, step: TraceStep) -> Mask:
    """Which of these times are in a step."""
    return (times >= step.start) & (times < step.end)


# Tensors


def tensors_of(
    facts: Mapping[int, RankFacts],
    traces: TracesByRank,
    buckets: Sequence[Bucket],
    hosts: Mapping[int, Intervals],
) -> list[GradientTensor]:
    """The gradients in the order in which DDP puts them into buckets, each with when it is ready; none where
    this order does not give the buckets that DDP made, as with parameters of several types."""
    first_facts = facts[min(facts)]
    if not _are_buckets_of(first_facts):
        return []

    sizes = first_facts.tensor_bytes
    steps = []
    for rank, trace in traces.items():
        for step in trace.steps:
            times = _tensor_times(trace, step, len(sizes), hosts[rank])
            if len(times):
                steps.append(times)

    means = np.mean(steps, axis=0) if steps else _between(sizes, buckets)
    tensors = []
    for size, times_of_tensor in zip(sizes, means.tolist(), strict=True):
        ready_s, backward_s, host_s = times_of_tensor
        tensor = GradientTensor(
            num_bytes=size, ready_s=ready_s, backward_s=backward_s, host_s=host_s
        )
        tensors.append(tensor)

    return tensors


def _are_buckets_of(facts: RankFacts) -> bool:
    """Whether these tensors, in their order, fill the buckets that DDP made, whose first is smaller
    by default."""
    sizes = facts.tensor_bytes
    if not sizes:
        return False

    cap_bytes = int(facts.job.bucket_cap_mb * MIB)
    for first_bytes in (None, FIRST_BYTES):
        plan = filled(sizes, cap_bytes, first_bytes=first_bytes)
        bucket_bytes = [sum(sizes[number] for number in bucket) for bucket in plan]
        if facts.bucket_bytes == tuple(bucket_bytes):
            return True

    return False


def _tensor_times(trace: RankTrace, step: TraceStep, num_tensors: int, host: Intervals) -> Numbers:
    """The last backward pass, with a gradient in a row: its `ready_s`, `backward_s` and `host_s`; empty
    where the trace does not have it, as in a CUDA graph. Micro-batches before it have gradients, too,
    which are only added up."""
    times = trace.gradients[_is_in_step(trace.gradients, step)]
    calls = bucket_calls(trace, step, 0)
    if not calls or len(times) < num_tensors or len(times) % num_tensors:
        return np.empty((0, 3))

    ready = _computed_at(trace, step, times[-num_tensors:])
    ready_s = _since(step.start, trace.compute, ready)
    backward_s = np.maximum(0.0, ready_s - _before_backward_s(trace, step, calls))
    host_s = _since(step.start, host, ready)

    return np.stack([ready_s, backward_s, host_s], axis=1)


def _since(start: float, intervals: Intervals, times: Numbers) -> Numbers:
    """How much of the set is between the start and each of these times."""
    return length_until(intervals, times) - length_until(intervals, np.array([start]))


def _between(sizes: Sequence[int], buckets: Sequence[Bucket]) -> Numbers:
    """The same where tensors were not timed: in proportion to their bytes, between their buckets.
    A tensor that ends at half of the bytes of a bucket is ready halfway between that bucket and the
    one before."""
    tensor_ends = np.cumsum(sizes)
    sent = np.cumsum([0, *(bucket.num_bytes for bucket in buckets)])
    # Fewer bytes are sent where they are rounded.
    bucket_ends = sent * tensor_ends[-1] / max(1, sent[-1])

    first = buckets[0]
    rows = [(first.ready_s - first.backward_s, 0.0, first.host_s)]
    rows += [(bucket.ready_s, bucket.backward_s, bucket.host_s) for bucket in buckets]
    columns = np.array(rows, dtype=np.float64).T
    times = [np.interp(tensor_ends, bucket_ends, column) for column in columns]

    return np.stack(times, axis=1)
