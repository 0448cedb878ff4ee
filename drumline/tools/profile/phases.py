"""The phases of a rank's steps, and the user's lines in them: the time that the trace leaves to the
host, divided by the samples of its stack.

Communication and the wait for other ranks are the trace's; garbage collections are exact; all other
time belongs to the phase that the sampler saw. A GPU computes for the phase that launched the
kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from drumline.runs.profile_files import (
    WORKERS,
    RankFacts,
    SampledLine,
    StackSamples,
)
from drumline.runs.profile_result import PAUSES, BusyThread, Collections, LineCost, WorkerStarts
from drumline.tools.profile.breakdown import divided
from drumline.tools.profile.intervals import (
    Intervals,
    clipped,
    contains,
    intersection,
    length,
    length_until,
    union,
)
from drumline.tools.profile.line_costs import (
    FORWARD_PHASES,
    REST,
    Seconds,
    costliest,
    costliest_first,
    is_user_s_own,
    place_of,
    without_gradient,
)
from drumline.tools.profile.rank_trace import RankTrace, open_times, spans

C = TypeVar("C", Collections, WorkerStarts)
COMPUTE = "compute"
COMMUNICATION = "communication, exposed"
WAITING = "waiting for a slower rank"
COLLECTION = "garbage collection"
ADDED = [field.name for field in fields(LineCost) if field.type == "float"]
"""What of the lines of several ranks is added up."""
USUAL_CALL_S = 0.2e-3
"""For an operation that it calls torch needs less Python."""


@dataclass(frozen=True, kw_only=True)
class RankPhases:
    """Means over the steps of one rank, or of all; `ProfileResult` describes the fields."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[LineCost, ...] = ()
    communication_phases_s: Mapping[str, float] = field(default_factory=dict)
    collective_lines: tuple[LineCost, ...] = ()
    special_lines: tuple[LineCost, ...] = ()
    undifferentiated: tuple[LineCost, ...] = ()
    worker_starts: WorkerStarts | None = None
    collections: Collections | None = None
    threads: tuple[BusyThread, ...] = ()


def phases_of_rank(facts: RankFacts, trace: RankTrace, waiting: Intervals) -> RankPhases:
    """`waiting`: when it waited for other ranks."""
    stacks = facts.stacks
    if not stacks.samples:
        return RankPhases()

    times = SampleTimes(stacks, trace)
    steps = spans(trace.steps)
    claims = {
        COMPUTE: trace.compute,
        WAITING: waiting,
        COMMUNICATION: open_times(trace.collectives),
        COLLECTION: times.collections(),
    }
    parts = divided(steps, claims, REST)
    communication = union(np.concatenate([parts[WAITING], parts[COMMUNICATION]]))
    not_buckets = [call for call in trace.collectives if not call.is_bucket]
    other_communication = intersection(communication, open_times(not_buckets))
    num_steps = len(trace.steps)

    # Of each sample, as means over the steps.
    idle_s = times.within(parts[REST]) / num_steps
    computes_s = times.computed(steps, parts[COMPUTE]) / num_steps
    seconds = idle_s + computes_s
    differentiated_s = times.differentiated(steps, parts[COMPUTE]) / num_steps

    phases_s = times.by_phase(seconds)
    for name in (WAITING, COMMUNICATION, COLLECTION):
        if len(parts[name]):
            phases_s[name] = length(parts[name]) / num_steps

    unsampled_s = length(steps) / num_steps - sum(phases_s.values())
    phases_s[REST] = phases_s.get(REST, 0.0) + max(0.0, unsampled_s)

    own_s = idle_s * is_user_s_own(stacks) + times.in_torch(idle_s)
    backward_s = times.shares_of_backward() * phases_s.get("backward", 0.0)
    costs = {
        "seconds": seconds,
        "host_s": idle_s,
        "own_s": own_s,
        "cpu_s": own_s * times.cpu_shares(),
        "backward_s": backward_s,
    }
    special_s = np.minimum(computes_s, times.sums(*trace.special.T) / num_steps)
    special_s += backward_s * special_s / np.maximum(computes_s, 1e-9)
    lines = costliest(stacks, costs, times.operations(), times.steps())

    return RankPhases(
        phases_s=phases_s,
        lines=(*lines, *lines_of_pauses(facts, times)),
        communication_phases_s=times.by_phase(times.communicated(communication) / num_steps),
        collective_lines=tuple(
            costliest(stacks, {"seconds": times.communicated(other_communication) / num_steps})
        ),
        special_lines=tuple(costliest(stacks, {"seconds": special_s})),
        undifferentiated=tuple(without_gradient(stacks, seconds, computes_s, differentiated_s)),
        worker_starts=times.worker_starts(),
        collections=collections_of(stacks, phases_s.get(COLLECTION, 0.0), facts.num_steps),
        threads=tuple(threads_of(facts, float(times.lasts_s.sum()))),
    )


def lines_of_pauses(facts: RankFacts, times: SampleTimes) -> list[LineCost]:
    """Those of evaluations and saves, which are in no step."""
    if not facts.pauses:
        return []

    paused_s = times.lasts_s * times.is_in(PAUSES) / facts.num_steps
    own_s = paused_s * is_user_s_own(facts.stacks)
    costs = {"seconds": paused_s, "own_s": own_s, "cpu_s": own_s * times.cpu_shares()}

    return costliest(facts.stacks, costs)


class SampleTimes:
    """When each sample of a stack began and ended, in the trace's time, and what happened then."""

    def __init__(self, stacks: StackSamples, trace: RankTrace) -> None:
        self._stacks = stacks
        self._trace = trace

        # A sample lasts until the next one.
        edges_ns = [stacks.began_ns, *(sample.until_ns for sample in stacks.samples)]
        edges = (np.array(edges_ns, dtype=np.float64) - trace.base_ns) / 1e9
        self._starts = edges[:-1]
        self._ends = edges[1:]
        self.lasts_s = self._ends - self._starts
        self._phases = np.array([sample.phase for sample in stacks.samples])

    def within(self, intervals: Intervals) -> Seconds:
        """How much of each sample is in the set."""
        return length_until(intervals, self._ends) - length_until(intervals, self._starts)

    def sums(self, times: Seconds, seconds: Seconds) -> Seconds:
        """The sums over each sample of what begins at these times."""
        samples = np.searchsorted(self._ends, times, "right").clip(0, len(self._ends) - 1)
        return np.bincount(samples, seconds, len(self._ends)).astype(np.float64)

    def computed(self, steps: Intervals, compute: Intervals) -> Seconds:
        """How long a rank computes for each sample."""
        if not self._trace.is_device:
            return self.within(compute)
        return self._launched(steps, self._trace.launches)

    def differentiated(self, steps: Intervals, compute: Intervals) -> Seconds:
        """The same, of operations that have a gradient."""
        differentiated = self._trace.differentiated
        if not self._trace.is_device:
            return self.within(intersection(compute, differentiated))

        launches = self._trace.launches
        return self._launched(steps, launches[contains(differentiated, launches[:, 0])])

    def _launched(self, steps: Intervals, rows: Intervals) -> Seconds:
        """How long the device computes for each sample: kernels that the host launched then. They
        may overlap, and together take as long as the device computes."""
        starts = rows[:, 1]
        is_in_steps = (starts >= steps[0, 0]) & (starts < steps[-1, 1])
        launches, starts, ends = rows[is_in_steps].T
        kernels_s = self.sums(launches, ends - starts)

        kernels = intersection(steps, union(rows[:, 1:]))
        computes_s = length(intersection(self._trace.compute, kernels))
        shares: Seconds = kernels_s * (computes_s / max(float(kernels_s.sum()), 1e-12))
        return shares

    def communicated(self, communication: Intervals) -> Seconds:
        """How much of this communication belongs to each sample: on a GPU, where the host goes on,
        that of the collectives which it called then."""
        if not self._trace.is_device:
            return self.within(communication)

        calls = self._trace.collectives
        called = [call.call if call.host_call is None else call.host_call for call in calls]
        seconds = [length(clipped(communication, call.call, call.end)) for call in calls]
        return self.sums(np.array(called), np.array(seconds))

    def collections(self) -> Intervals:
        """The garbage collections."""
        base_ns = self._trace.base_ns
        return union(
            ((row.began_ns - base_ns) / 1e9, (row.ended_ns - base_ns) / 1e9)
            for row in self._stacks.collections
        )

    def is_in(self, phases: Sequence[str]) -> NDArray[np.bool_]:
        """Which samples are of these phases."""
        return np.isin(np.array(self._stacks.phases)[self._phases], phases)

    def steps(self) -> NDArray[np.int64]:
        """The number of the step in which each sample ends, from 0."""
        starts = [step.start for step in self._trace.steps]
        return np.searchsorted(starts, self._ends).clip(1) - 1

    def operations(self) -> NDArray[np.int64]:
        """How many operations begin in each sample."""
        return self._count(self._trace.host_operations[:, 0])

    def in_torch(self, idle_s: Seconds) -> Seconds:
        """How long each sample is in Python of torch that calls no operations: it reads a file,
        compiles, makes a process group."""
        lines = [self._stacks.lines[sample.line] for sample in self._stacks.samples]
        is_torch = np.array([line.library == "torch" for line in lines])
        longer_s = idle_s - USUAL_CALL_S * self.operations() / len(self._trace.steps)
        seconds: Seconds = np.maximum(0.0, longer_s) * is_torch * self.is_in(FORWARD_PHASES)

        return seconds

    def shares_of_backward(self) -> Seconds:
        """Which part of the backward pass belongs to each sample, by the number of its operations
        that have a gradient."""
        counts = self._count(self._trace.differentiated[:, 0])
        shares: Seconds = counts / max(1, counts.sum())
        return shares

    def _count(self, times: Seconds) -> NDArray[np.int64]:
        """How many of these times, in order, are in each sample."""
        return np.searchsorted(times, self._ends) - np.searchsorted(times, self._starts)

    def worker_starts(self) -> WorkerStarts | None:
        """A step in which workers start waits longer for its batch than the others."""
        samples = np.stack([self._starts, self._ends], axis=1)
        starts = union(samples[self.is_in([WORKERS])])
        loading = union(np.concatenate([starts, self._trace.data]))

        waits_with_start: list[float] = []
        usual_waits: list[float] = []
        for step in self._trace.steps:
            has_start = len(clipped(starts, step.start, step.end))
            waits = waits_with_start if has_start else usual_waits
            waits.append(length(clipped(loading, step.start, step.end)))

        if not waits_with_start:
            return None

        usual_s = median(usual_waits or [0.0])
        longer_s = sum(max(0.0, wait_s - usual_s) for wait_s in waits_with_start)
        return WorkerStarts(
            num_steps=len(waits_with_start),
            seconds=longer_s / len(self._trace.steps),
        )

    def by_phase(self, seconds: Seconds) -> dict[str, float]:
        """The sums of what the samples of each phase took."""
        sums = np.bincount(self._phases, seconds, len(self._stacks.phases)).tolist()
        phases = zip(self._stacks.phases, sums, strict=True)
        return {name: phase_s for name, phase_s in phases if phase_s > 0}

    def cpu_shares(self) -> Seconds:
        """How much of each sample its thread was on a CPU."""
        cpu_s = np.array([sample.cpu_ns for sample in self._stacks.samples]) / 1e9
        shares: Seconds = np.minimum(1.0, cpu_s / np.maximum(self.lasts_s, 1e-9))
        return shares


def pauses_of(facts: RankFacts) -> dict[str, float]:
    """Evaluations and saves, as means over all profiled steps."""
    seconds: dict[str, float] = defaultdict(float)
    for pause in facts.pauses:
        seconds[pause.reason] += (pause.ended_ns - pause.began_ns) / 1e9 / facts.num_steps

    return seconds


def collections_of(stacks: StackSamples, seconds: float, num_steps: int) -> Collections | None:
    """The garbage collections of a step, which take this long together."""
    if not stacks.collections:
        return None

    lines_ns: dict[SampledLine, float] = defaultdict(float)
    for row in stacks.collections:
        line = stacks.lines[row.line]
        if line.file:
            lines_ns[line] += row.ended_ns - row.began_ns

    costliest_line = max(lines_ns, key=lines_ns.__getitem__, default=None)

    return Collections(
        seconds=seconds,
        full=len(stacks.collections) / num_steps,
        source=place_of(costliest_line) if costliest_line else "",
        is_asked_for=costliest_line is not None and "collect(" in costliest_line.source,
    )


def threads_of(facts: RankFacts, lasts_s: float) -> Iterator[BusyThread]:
    """Those that ran code of the user's in this time."""
    for thread in facts.stacks.threads:
        line = facts.stacks.lines[thread.line]
        if line.file:
            yield BusyThread(
                rank=facts.rank,
                name=thread.name,
                cores=thread.cpu_s / max(lasts_s, 1e-9),
                source=place_of(line),
            )


# All ranks together


def mean_over_ranks(ranks: Sequence[RankPhases]) -> RankPhases:
    """The threads are those of all ranks."""
    return RankPhases(
        phases_s=mean_phases([rank.phases_s for rank in ranks]),
        lines=mean_lines([rank.lines for rank in ranks]),
        communication_phases_s=mean_phases([rank.communication_phases_s for rank in ranks]),
        collective_lines=mean_lines([rank.collective_lines for rank in ranks]),
        special_lines=mean_lines([rank.special_lines for rank in ranks]),
        undifferentiated=mean_lines([rank.undifferentiated for rank in ranks]),
        worker_starts=_mean_cost([rank.worker_starts for rank in ranks]),
        collections=_mean_cost([rank.collections for rank in ranks]),
        threads=tuple(thread for rank in ranks for thread in rank.threads),
    )


def mean_known(numbers: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None: none is."""
    measured = [number for number in numbers if number is not None]
    return fmean(measured) if measured else None


def mean_phases(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means over ranks, the longest first."""
    names = dict.fromkeys(name for table in tables for name in table)
    means = {name: fmean(table.get(name, 0.0) for table in tables) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def mean_lines(tables: Sequence[Sequence[LineCost]]) -> tuple[LineCost, ...]:
    """The costs of each function and caller over all ranks, with the line of the rank where it costs most."""
    by_function: dict[tuple[str, str, str, str], list[LineCost]] = defaultdict(list)
    for table in tables:
        for line in table:
            file = line.source.rpartition(":")[0]
            function = "" if line.caller else line.function
            by_function[line.phase, file, function, line.caller].append(line)

    means = []
    for lines in by_function.values():
        sums = {name: sum(getattr(line, name) for line in lines) for name in ADDED}
        values = {name: value / len(tables) for name, value in sums.items()}
        means.append(replace(max(lines, key=lambda line: line.seconds), **values))

    return tuple(costliest_first(means))


def _mean_cost(costs: Sequence[C | None]) -> C | None:
    """That of the rank where it takes longest, with the mean over all; None: no rank has it."""
    costs_of_ranks = [cost for cost in costs if cost is not None]
    if not costs_of_ranks:
        return None

    seconds = sum(cost.seconds for cost in costs_of_ranks) / len(costs)
    return replace(max(costs_of_ranks, key=lambda cost: cost.seconds), seconds=seconds)
