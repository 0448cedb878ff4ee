"""The phases of a rank's steps, and the user's lines in them: the time that the trace leaves to the
host, divided by the samples of its stack.

Communication and the wait for other ranks are the trace's; garbage collections are exact; all other
time belongs to the phase that the sampler saw. A GPU computes for the phase that launched the
kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.runs.profile_files import CLIPPING, WORKERS, RankFacts, SampledLine, StackSamples
from drumline.runs.profile_result import PAUSES, BusyThread, Collections, LineCost, WorkerStarts
from drumline.tools.profile.intervals import (
    Intervals,
    clipped,
    difference,
    intersection,
    length,
    length_until,
    union,
)
from drumline.tools.profile.trace_file import RankTrace

COMMUNICATION = "communication, exposed"
WAITING = "waiting for a slower rank"
COLLECTION = "garbage collection"
REST = "rest"
OUR_LIBRARIES = ("torch", "drumline")
"""What they do is not the user's Python."""
MOST_LINES = 20
BUSY_THREAD = 0.2
"""Of a core: threads that use less are not worth a word."""
DIFFERENTIATED_PHASES = ("forward", "to the device", REST)
"""Where operations usually have a gradient."""
DIFFERENTIATED = 0.2
"""Of what code computes: with less in operations that have a gradient, it has none. Some of those
before and after it are in its first and last sample."""
TRACEBACKS = ("traceback", "linecache")
NAN_CHECKS = ("aten::isnan", "aten::ne", "aten::any")
"""What anomaly detection calls for each operation."""
Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankPhases:
    """Of one rank, as means over its steps."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[LineCost, ...] = ()
    communication_phases_s: Mapping[str, float] = field(default_factory=dict)
    collective_lines: tuple[LineCost, ...] = ()
    undifferentiated: tuple[LineCost, ...] = ()
    anomaly_s: float = 0.0
    worker_starts: WorkerStarts | None = None
    off_cpu_s: float | None = None
    collections: Collections | None = None
    threads: tuple[BusyThread, ...] = ()


def phases_of_rank(facts: RankFacts, trace: RankTrace, waiting: Intervals) -> RankPhases:
    """`waiting`: when it waited for other ranks."""
    stacks = facts.stacks
    if not stacks.samples:
        return RankPhases()
    times = SampleTimes(stacks, trace.base_ns)
    host = HostTime(trace, waiting, times.collections(stacks))
    num_steps = len(trace.steps)
    idle_s = times.within(host.rest) / num_steps
    computes_s = times.computed(trace, host) / num_steps
    seconds = idle_s + computes_s
    differentiated_s = times.differentiated(trace, host) / num_steps
    phases_s = times.by_phase(stacks, seconds) | {
        name: length(intervals) / num_steps
        for name, intervals in host.named.items()
        if len(intervals)
    }
    unsampled_s = length(host.steps) / num_steps - sum(phases_s.values())
    phases_s[REST] = phases_s.get(REST, 0.0) + max(0.0, unsampled_s)
    cpu_shares = times.cpu_shares(stacks)
    paused_s = times.paused(stacks) / facts.num_steps
    in_others_s = times.within(host.other_collectives) / num_steps
    communicates_s = times.within(host.communication) / num_steps
    return RankPhases(
        phases_s=phases_s,
        lines=(
            *costliest(stacks, seconds, idle_s, cpu_shares, times.begun(stacks, trace) / num_steps),
            *(costliest(stacks, paused_s, paused_s, cpu_shares) if facts.pauses else ()),
        ),
        communication_phases_s=times.by_phase(stacks, communicates_s),
        collective_lines=tuple(costliest(stacks, in_others_s, np.zeros_like(idle_s), cpu_shares)),
        undifferentiated=tuple(without_gradient(stacks, seconds, computes_s, differentiated_s)),
        anomaly_s=anomaly_seconds(stacks, seconds, trace),
        worker_starts=times.worker_starts(stacks, trace),
        off_cpu_s=float((idle_s * (1 - cpu_shares)).sum()),
        collections=collections_of(stacks, phases_s.get(COLLECTION, 0.0), facts.num_steps),
        threads=tuple(threads_of(facts, times.lasts_s)),
    )


class HostTime:
    """The steps of a rank in sets of instants: what the trace knows, and the rest, which is the
    host's."""

    def __init__(self, trace: RankTrace, waiting: Intervals, collections: Intervals) -> None:
        self.steps = union((step.start, step.end) for step in trace.steps)
        idle = difference(self.steps, trace.compute)
        waits = intersection(idle, waiting)
        left = difference(idle, waits)
        exposed = intersection(left, union((call.call, call.end) for call in trace.collectives))
        left = difference(left, exposed)
        collected = intersection(left, collections)
        self.named = {WAITING: waits, COMMUNICATION: exposed, COLLECTION: collected}
        self.rest = difference(left, collected)
        self.busy = difference(self.steps, idle)
        not_buckets = union(
            (call.call, call.end) for call in trace.collectives if not call.is_bucket
        )
        self.communication = union(np.concatenate([waits, exposed]))
        self.other_collectives = intersection(self.communication, not_buckets)


class SampleTimes:
    """When each sample began and ended, in the trace's time."""

    def __init__(self, stacks: StackSamples, base_ns: int) -> None:
        until = [sample.until_ns for sample in stacks.samples]
        self._base_ns = base_ns
        self._ends = (np.array(until, dtype=np.float64) - base_ns) / 1e9
        self._starts = np.concatenate([[(stacks.began_ns - base_ns) / 1e9], self._ends[:-1]])

    @property
    def lasts_s(self) -> float:
        return float(self._ends[-1] - self._starts[0])

    def within(self, intervals: Intervals) -> Seconds:
        """How much of each sample is in the set."""
        return length_until(intervals, self._ends) - length_until(intervals, self._starts)

    def computed(self, trace: RankTrace, host: HostTime) -> Seconds:
        """How long a rank computes for each sample."""
        if not trace.is_device:
            return self.within(host.busy)
        return self._launched(trace, host.steps, trace.launches)

    def differentiated(self, trace: RankTrace, host: HostTime) -> Seconds:
        """The same, of operations that have a gradient."""
        if not trace.is_device:
            return self.within(intersection(host.busy, trace.differentiated))
        launches = trace.launches
        places = np.searchsorted(trace.differentiated.reshape(-1), launches[:, 0], "right")
        return self._launched(trace, host.steps, launches[places % 2 == 1])

    def _launched(self, trace: RankTrace, steps: Intervals, rows: Intervals) -> Seconds:
        """How long the device computes for each sample: kernels that the host launched then. They
        may overlap, and together take as long as the device computes."""
        seconds = np.zeros(len(self._ends))
        launches, starts, ends = rows.T
        is_in_steps = (starts >= steps[0, 0]) & (starts < steps[-1, 1])
        numbers = np.searchsorted(self._ends, launches[is_in_steps]).clip(0, len(seconds) - 1)
        np.add.at(seconds, numbers, (ends - starts)[is_in_steps])
        computes_s = length(intersection(trace.compute, intersection(steps, union(rows[:, 1:]))))
        shares: Seconds = seconds * (computes_s / max(float(seconds.sum()), 1e-12))
        return shares

    def collections(self, stacks: StackSamples) -> Intervals:
        return union(
            ((row.began_ns - self._base_ns) / 1e9, (row.ended_ns - self._base_ns) / 1e9)
            for row in stacks.collections
        )

    def begun(self, stacks: StackSamples, trace: RankTrace) -> Seconds:
        """How many operations with a gradient begin in each sample; where gradients are clipped,
        how many calls that do it."""
        is_clipping = [stacks.phases[sample.phase] == CLIPPING for sample in stacks.samples]
        bounds = np.stack([self._starts, self._ends], axis=1)
        operations = np.diff(np.searchsorted(trace.differentiated[:, 0], bounds))[:, 0]
        clippings = np.diff(np.searchsorted(trace.clippings, bounds))[:, 0]
        counts: Seconds = np.where(is_clipping, clippings, operations).astype(np.float64)
        return counts

    def worker_starts(self, stacks: StackSamples, trace: RankTrace) -> WorkerStarts | None:
        """A step in which workers start waits longer for its batch than the others."""
        is_start = [stacks.phases[sample.phase] == WORKERS for sample in stacks.samples]
        starts = union(np.stack([self._starts, self._ends], axis=1)[is_start])
        loading = union(np.concatenate([starts, trace.data]))
        waits: dict[bool, list[float]] = {True: [], False: []}
        for step in trace.steps:
            has_start = length(clipped(starts, step.start, step.end)) > 0
            waits[has_start].append(length(clipped(loading, step.start, step.end)))
        if not waits[True]:
            return None
        usual_s = float(np.median(waits[False])) if waits[False] else 0.0
        longer_s = sum(max(0.0, wait_s - usual_s) for wait_s in waits[True])
        return WorkerStarts(num_steps=len(waits[True]), seconds=longer_s / len(trace.steps))

    def by_phase(self, stacks: StackSamples, seconds: Seconds) -> dict[str, float]:
        sums = np.zeros(len(stacks.phases))
        np.add.at(sums, [sample.phase for sample in stacks.samples], seconds)
        return {
            name: float(total) for name, total in zip(stacks.phases, sums, strict=True) if total > 0
        }

    def paused(self, stacks: StackSamples) -> Seconds:
        """How long each sample is, if it is of an evaluation or a save."""
        is_paused = [stacks.phases[sample.phase] in PAUSES for sample in stacks.samples]
        paused: Seconds = (self._ends - self._starts) * is_paused
        return paused

    def cpu_shares(self, stacks: StackSamples) -> Seconds:
        """How much of each sample its thread was on a CPU."""
        lasts_s = np.maximum(self._ends - self._starts, 1e-9)
        cpu_s = np.array([sample.cpu_ns for sample in stacks.samples]) / 1e9
        shares: Seconds = np.minimum(1.0, cpu_s / lasts_s)
        return shares


def pauses_of(facts: RankFacts) -> dict[str, float]:
    """Evaluations and saves, as means over all profiled steps."""
    seconds: dict[str, float] = defaultdict(float)
    for pause in facts.pauses:
        seconds[pause.reason] += (pause.ended_ns - pause.began_ns) / 1e9 / facts.num_steps
    return dict(seconds)


@dataclass
class _FunctionCost:
    """Of a function of the user's in one phase."""

    seconds: float = 0.0
    own_s: float = 0.0
    cpu_s: float = 0.0
    lines: dict[SampledLine, float] = field(default_factory=lambda: defaultdict(float))
    operations: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By the number of the line that calls them."""


def costliest(
    stacks: StackSamples,
    seconds: Seconds,
    idle_s: Seconds,
    cpu_shares: Seconds,
    operations: Seconds | None = None,
) -> list[LineCost]:
    """The functions of the user's code by their time in each phase, with the costliest line of
    each. `seconds`, `idle_s`: of each sample, all and without any operation; `operations`: how many
    begin."""
    functions: dict[tuple[int, str, str], _FunctionCost] = defaultdict(_FunctionCost)
    counts = np.zeros_like(seconds) if operations is None else operations
    columns = np.stack([seconds, idle_s, cpu_shares, counts], axis=1).tolist()
    for sample, (lasts_s, idle, cpu_share, count) in zip(stacks.samples, columns, strict=True):
        line = stacks.lines[sample.line]
        if not line.file or lasts_s <= 0:
            continue
        cost = functions[sample.phase, line.file, line.function]
        cost.seconds += lasts_s
        cost.lines[line] += lasts_s
        if not line.library or stacks.phases[sample.phase] == CLIPPING:
            cost.operations[line.line] += count
        if line.library not in OUR_LIBRARIES:
            cost.own_s += idle
            cost.cpu_s += idle * cpu_share
    lines = [_line_cost(stacks.phases[key[0]], cost) for key, cost in functions.items()]
    return sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]


def _line_cost(phase: str, cost: _FunctionCost) -> LineCost:
    by_place: dict[tuple[int, str], float] = defaultdict(float)
    for line, seconds in cost.lines.items():
        by_place[line.line, line.source] += seconds
    number, text = max(by_place, key=lambda place: by_place[place])
    first = next(iter(cost.lines))
    return LineCost(
        phase=phase,
        source=f"{first.file}:{number}",
        function=first.function,
        text=text,
        seconds=cost.seconds,
        own_s=cost.own_s,
        cpu_s=cost.cpu_s,
        operations=cost.operations[number],
    )


@dataclass
class _Computation:
    """What a statement or a function computes."""

    seconds: float = 0.0
    computes_s: float = 0.0
    differentiated_s: float = 0.0
    lines: dict[tuple[str, SampledLine], float] = field(default_factory=lambda: defaultdict(float))

    def add(
        self,
        phase: str,
        line: SampledLine,
        seconds: float,
        computes_s: float,
        differentiated_s: float,
    ) -> None:
        self.seconds += seconds
        self.computes_s += computes_s
        self.differentiated_s += differentiated_s
        self.lines[phase, line] += seconds

    @property
    def has_gradient(self) -> bool:
        return (
            self.computes_s < self.seconds / 2
            or self.differentiated_s >= DIFFERENTIATED * self.computes_s
        )


def without_gradient(
    stacks: StackSamples, seconds: Seconds, computes_s: Seconds, differentiated_s: Seconds
) -> Iterator[LineCost]:
    """The user's statements that compute with torch and have no gradient, and functions in the
    others, by their costliest line. The times are of each sample."""
    if not stacks.statements or not differentiated_s.any():  # a captured step has no operations
        return
    lines = stacks.lines
    rows = np.stack([seconds, computes_s, differentiated_s], axis=1).tolist()

    def by(key_of: Callable[[int], Any]) -> dict[Any, _Computation]:
        """By this key of the number of a sample."""
        computations: dict[Any, _Computation] = defaultdict(_Computation)
        for number, (sample, times) in enumerate(zip(stacks.samples, rows, strict=True)):
            phase = stacks.phases[sample.phase]
            if phase in DIFFERENTIATED_PHASES:
                computations[key_of(number)].add(phase, lines[sample.line], *times)
        return computations

    statements = by(lambda number: stacks.statements[number])
    for statement, computation in statements.items():
        if not computation.has_gradient and lines[statement].file:
            caller = f"{lines[statement].file}:{lines[statement].line}"
            yield _computation_cost(computation, caller)

    def function_of(number: int) -> tuple[str, str] | None:
        line = lines[stacks.samples[number].line]
        is_counted = statements[stacks.statements[number]].has_gradient and line.file
        return (line.file, line.function) if is_counted else None

    for function, computation in by(function_of).items():
        if function is not None and not computation.has_gradient:
            yield _computation_cost(computation, "")


def _computation_cost(computation: _Computation, caller: str) -> LineCost:
    phase, line = max(computation.lines, key=lambda key: computation.lines[key])
    return LineCost(
        phase=phase,
        source=f"{line.file}:{line.line}",
        function=line.function,
        text=line.source,
        seconds=computation.seconds,
        own_s=0.0,
        cpu_s=0.0,
        caller=caller,
    )


def anomaly_seconds(stacks: StackSamples, seconds: Seconds, trace: RankTrace) -> float:
    """Anomaly detection records a traceback of each operation, and checks each gradient."""
    if not stacks.detects_anomalies:
        return 0.0
    is_traceback = [stacks.lines[sample.line].library in TRACEBACKS for sample in stacks.samples]
    checks_s = sum(row.seconds for row in trace.operations if row.name in NAN_CHECKS)
    return float(seconds[is_traceback].sum()) + checks_s / len(trace.steps)


def collections_of(stacks: StackSamples, seconds: float, num_steps: int) -> Collections | None:
    full = [row for row in stacks.collections if row.generation == 2]
    by_line: dict[int, int] = defaultdict(int)
    for row in full:
        if stacks.lines[row.line].file:
            by_line[row.line] += row.ended_ns - row.began_ns
    if not stacks.collections:
        return None
    if not by_line:
        return Collections(seconds=seconds, full=len(full) / num_steps)
    line = stacks.lines[max(by_line, key=lambda number: by_line[number])]
    return Collections(
        seconds=seconds,
        full=len(full) / num_steps,
        source=f"{line.file}:{line.line}",
        is_asked_for="collect(" in line.source,
    )


def threads_of(facts: RankFacts, lasts_s: float) -> Iterator[BusyThread]:
    for thread in facts.stacks.threads:
        line = facts.stacks.lines[thread.line]
        cores = thread.cpu_s / max(lasts_s, 1e-9)
        if cores >= BUSY_THREAD and line.file:
            yield BusyThread(
                rank=facts.rank, name=thread.name, cores=cores, source=f"{line.file}:{line.line}"
            )


# All ranks together


def mean_phases(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means over ranks, the longest first."""
    names = dict.fromkeys(name for table in tables for name in table)
    means = {name: sum(table.get(name, 0.0) for table in tables) / len(tables) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def mean_lines(tables: Sequence[Sequence[LineCost]], num_ranks: int) -> list[LineCost]:
    """The costs of each function and caller over all ranks, with the line of the rank where it costs most."""
    by_function: dict[tuple[str, str, str, str], list[LineCost]] = defaultdict(list)
    for line in (line for table in tables for line in table):
        file = line.source.rpartition(":")[0]
        by_function[line.phase, file, line.function, line.caller].append(line)
    means = [
        replace(
            max(lines, key=lambda line: line.seconds),
            seconds=sum(line.seconds for line in lines) / num_ranks,
            own_s=sum(line.own_s for line in lines) / num_ranks,
            cpu_s=sum(line.cpu_s for line in lines) / num_ranks,
            operations=sum(line.operations for line in lines) / num_ranks,
        )
        for lines in by_function.values()
    ]
    return sorted(means, key=lambda line: -line.seconds)[:MOST_LINES]


def mean_collections(ranks: Sequence[RankPhases]) -> Collections | None:
    costs = [phases.collections for phases in ranks if phases.collections is not None]
    if not costs:
        return None
    costliest_rank = max(costs, key=lambda cost: cost.seconds)
    return Collections(
        seconds=sum(cost.seconds for cost in costs) / len(ranks),
        full=sum(cost.full for cost in costs) / len(ranks),
        source=costliest_rank.source,
        is_asked_for=costliest_rank.is_asked_for,
    )


def mean_worker_starts(ranks: Sequence[WorkerStarts | None]) -> WorkerStarts | None:
    starts = [of_rank for of_rank in ranks if of_rank is not None]
    if not starts:
        return None
    return WorkerStarts(
        num_steps=max(of_rank.num_steps for of_rank in starts),
        seconds=sum(of_rank.seconds for of_rank in starts) / len(ranks),
    )
