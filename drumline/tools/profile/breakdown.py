"""Where the time of the profiled steps goes: collectives matched across ranks, and the parts of
each rank's steps.

Every instant of a step belongs to exactly one part (`profile_result.PARTS`), so the parts add up to
the step:

    compute 61 ms, waiting for rank 3 20 ms, exposed communication 12 ms, data 5 ms, gaps 2 ms
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from drumline.tools.profile.intervals import (
    Intervals,
    clipped,
    difference,
    intersection,
    length,
    union,
)
from drumline.tools.profile.rank_trace import (
    CollectiveCall,
    RankTrace,
    TracesByRank,
    TraceStep,
    open_times,
    spans,
)

LEFT_TOGETHER = ("allreduce", "barrier", "allgather")
"""Collectives that no rank leaves before all have joined: their ends compare clocks."""
CLOCK_ERROR_S = 1e-3
"""How far the clocks of two hosts may differ after they were compared."""


@dataclass(frozen=True, kw_only=True)
class MatchedCollective:
    """One collective on all ranks that take part in it."""

    kind: str
    by_rank: Mapping[int, CollectiveCall]

    @property
    def last_rank(self) -> int:
        """The rank that joined last."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank].call)

    @property
    def all_joined(self) -> float:
        """When the last rank joined."""
        return max(call.call for call in self.by_rank.values())

    @property
    def reduce_s(self) -> float:
        """From the moment when every rank works on it to its end on the last one."""
        calls = self.by_rank.values()
        last_start = max(call.start for call in calls)
        last_end = max(call.end for call in calls)

        return max(0.0, last_end - last_start)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One step of one rank."""

    step: TraceStep
    parts_s: Mapping[str, float]
    """By the names of `PARTS`."""
    hidden_s: float
    """Communication while it computes."""
    other_s: float
    """Open collectives that are no buckets of gradients."""
    num_other: int
    waited_s: Mapping[int, float]
    """How long this rank waited for each other rank."""


def matched(traces: TracesByRank, *, clock_error_s: float = math.inf) -> list[MatchedCollective]:
    """The collectives of all ranks: the n-th of a kind on one rank is the n-th on all.

    Each stays alone where that cannot be, as in process groups that the trace does not name: ranks
    have different numbers of them, or one rank left before another joined."""
    by_kind: dict[str, dict[int, list[CollectiveCall]]] = {}
    for rank, trace in traces.items():
        for call in trace.collectives:
            calls_by_rank = by_kind.setdefault(call.kind, {})
            calls_by_rank.setdefault(rank, []).append(call)

    collectives = []
    for kind, calls_by_rank in by_kind.items():
        for by_rank in _aligned(calls_by_rank):
            parts = [by_rank]
            if kind.startswith(LEFT_TOGETHER) and not _is_possible(by_rank, clock_error_s):
                parts = [{rank: call} for rank, call in by_rank.items()]

            collectives += [MatchedCollective(kind=kind, by_rank=part) for part in parts]

    return collectives


def _aligned(
    calls_by_rank: Mapping[int, Sequence[CollectiveCall]],
) -> list[dict[int, CollectiveCall]]:
    """The n-th calls of all ranks: `[{0: call, 1: call}, ...]`; each call alone where ranks have different
    numbers of them."""
    if len({len(calls) for calls in calls_by_rank.values()}) > 1:
        return [{rank: call} for rank, calls in calls_by_rank.items() for call in calls]

    rows = zip(*calls_by_rank.values(), strict=True)
    return [dict(zip(calls_by_rank, row, strict=True)) for row in rows]


def _is_possible(by_rank: Mapping[int, CollectiveCall], clock_error_s: float) -> bool:
    """Whether no rank left before another joined."""
    first_end = min(call.end for call in by_rank.values())
    last_call = max(call.call for call in by_rank.values())
    return last_call - first_end <= clock_error_s


def clock_difference(trace: RankTrace, reference: RankTrace) -> float:
    """How far the clock of one rank's host is ahead of the other's: the median of the differences
    between the ends of collectives, which all ranks leave together; 0 if they have none."""
    base_s = (trace.base_ns - reference.base_ns) / 1e9
    differences_s = []
    for pair in matched({0: trace, 1: reference}):
        if len(pair.by_rank) == 2 and pair.kind.startswith(LEFT_TOGETHER):
            difference_s = pair.by_rank[0].end - pair.by_rank[1].end + base_s
            differences_s.append(difference_s)

    return median(differences_s) if differences_s else 0.0


def divided(whole: Intervals, claims: Mapping[str, Intervals], rest: str) -> dict[str, Intervals]:
    """The whole in parts: each instant belongs to the first claim that has it, or to the rest.

    A step from 0 to 9 with the claims compute, `[[0, 6]]`, and data, `[[5, 7]]`, is 6 of compute, 1
    of data and 2 of the rest."""
    parts = {}
    for name, claim in claims.items():
        parts[name] = intersection(whole, claim)
        whole = difference(whole, claim)

    parts[rest] = whole
    return parts


def waits_of(
    rank: int, collectives: Sequence[MatchedCollective]
) -> dict[int, list[tuple[float, float]]]:
    """When this rank waited for each rank that joined a collective last: from its own call to the moment
    when the last one joined."""
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for collective in collectives:
        call = collective.by_rank.get(rank)
        if call is not None:
            end = min(collective.all_joined, call.end)
            waits[collective.last_rank].append((call.call, end))

    return waits


def waiting_of(rank: int, collectives: Sequence[MatchedCollective]) -> Intervals:
    """When this rank waited for any other."""
    waits_by_rank = waits_of(rank, collectives)
    return union(chain.from_iterable(waits_by_rank.values()))


def divide_steps(
    rank: int,
    trace: RankTrace,
    collectives: Sequence[MatchedCollective],
) -> list[StepParts]:
    """The steps of one rank. `trace` and `collectives` are by one clock."""
    calls = [collective.by_rank[rank] for collective in collectives if rank in collective.by_rank]
    other_calls = [call for call in calls if not call.is_bucket]
    communication = open_times(calls)
    claims = {
        "compute": trace.compute,
        "waiting_for_rank": waiting_of(rank, collectives),
        "exposed_communication": communication,
        "data": trace.data,
        "host_sync": spans(trace.syncs),
    }
    parts = divided(spans(trace.steps), claims, "gaps")
    hidden = intersection(communication, trace.compute)
    other_collectives = open_times(other_calls)
    idle_waits = {
        last_rank: difference(union(waits), trace.compute)
        for last_rank, waits in waits_of(rank, collectives).items()
        if last_rank != rank
    }

    def in_step(step: TraceStep, intervals: Intervals) -> float:
        """The seconds of this set in a step."""
        return length(clipped(intervals, step.start, step.end))

    return [
        StepParts(
            step=step,
            parts_s={name: in_step(step, part) for name, part in parts.items()},
            hidden_s=in_step(step, hidden),
            other_s=in_step(step, other_collectives),
            num_other=sum(step.start <= call.call < step.end for call in other_calls),
            waited_s={last: in_step(step, waits) for last, waits in idle_waits.items()},
        )
        for step in trace.steps
    ]
