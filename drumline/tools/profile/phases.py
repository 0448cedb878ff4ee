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

from drumline.runs.profile_files import (
    WORKERS,
    RankFacts,
    SampledLine,
    StackSamples,
)
from drumline.runs.profile_result import PAUSES, BusyThread, Collections, LineCost, WorkerStarts
from drumline.tools.profile.breakdown import divided
from drumline.tools.profile.intervals import (
    Integers,
    Intervals,
    Mask,
    Numbers,
    clipped,
    contains,
    intersection,
    length,
    length_until,
    union,
)
from drumline.tools.profile.rank_trace import RankTrace, open_times, spans

C = TypeVar("C", Collections, WorkerStarts)
COMPUTE = "compute"
COMMUNICATION = "communication, exposed"
WAITING = "waiting for a slower rank"
COLLECTION = "garbage collection"
REST = "rest"
FORWARD_PHASES = ("forward", "to the device", REST)
"""Where operations usually have a gradient, and where the user's code may call what is no operation of
torch: elsewhere torch's own code has its own phases."""
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


@dataclass(frozen=True, kw_only=True)
class SampleSeconds:
    """What each sample of a stack took, as means over the steps."""

    idle_s: Numbers
    """Nothing computed, and no rank was waited for: the host ran."""
    computes_s: Numbers
    differentiated_s: Numbers
    """Of `computes_s`, operations that have a gradient."""

    @property
    def seconds(self) -> Numbers:
        """All of it."""
        return self.idle_s + self.computes_s


def phases_of_rank(facts: RankFacts, trace: RankTrace, waiting: Intervals) -> RankPhases:
    """What the steps of a rank were spent on; nothing where its stack was not sampled.

    `waiting`: when it waited for other ranks."""
    stacks = facts.stacks
    if not stacks.samples:
        return RankPhases()

    times = SampleTimes(stacks, trace)
    claims = {
        COMPUTE: trace.compute,
        WAITING: waiting,
        COMMUNICATION: open_times(trace.collectives),
        COLLECTION: times.collections(),
    }
    parts = divided(spans(trace.steps), claims, REST)
    sampled = times.sampled(parts)
    phases_s = _phases_s(trace, times, parts, sampled)
    backward_s = times.shares_of_backward() * phases_s.get("backward", 0.0)

    communication = union(np.concatenate([parts[WAITING], parts[COMMUNICATION]]))
    other_calls = [call for call in trace.collectives if not call.is_bucket]
    other_communication = intersection(communication, open_times(other_calls))
    num_steps = len(trace.steps)
    communicated_s = times.communicated(communication) / num_steps
    others_s = times.communicated(other_communication) / num_steps

    special_s = times.sums(*trace.special.T) / num_steps
    special_s = np.minimum(sampled.computes_s, special_s)
    special_s += backward_s * special_s / np.maximum(sampled.computes_s, 1e-9)

    return RankPhases(
        phases_s=phases_s,
        lines=(*_lines_of_steps(times, sampled, backward_s), *_lines_of_pauses(facts, times)),
        communication_phases_s=times.by_phase(communicated_s),
        collective_lines=tuple(costliest(stacks, {"seconds": others_s})),
        special_lines=tuple(costliest(stacks, {"seconds": special_s})),
        undifferentiated=tuple(_without_gradient(stacks, sampled)),
        worker_starts=times.worker_starts(),
        collections=_collections_of(stacks, phases_s.get(COLLECTION, 0.0), facts.num_steps),
        threads=tuple(_threads_of(facts, float(times.lasts_s.sum()))),
    )


def _phases_s(
    trace: RankTrace,
    times: SampleTimes,
    parts: Mapping[str, Intervals],
    sampled: SampleSeconds,
) -> dict[str, float]:
    """The seconds of a step in each phase, which add up to the step."""
    num_steps = len(trace.steps)
    phases_s = times.by_phase(sampled.seconds)
    for name in (WAITING, COMMUNICATION, COLLECTION):
        if len(parts[name]):
            phases_s[name] = length(parts[name]) / num_steps

    unsampled_s = length(spans(trace.steps)) / num_steps - sum(phases_s.values())
    phases_s[REST] = phases_s.get(REST, 0.0) + max(0.0, unsampled_s)
    return phases_s


def pauses_of(facts: RankFacts) -> dict[str, float]:
    """Evaluations and saves, as means over all profiled steps.

    `{'evaluation': 0.3, 'save': 0.012}`: seconds for each step, though few steps have one.
    """
    seconds: dict[str, float] = defaultdict(float)
    for pause in facts.pauses:
        lasts_s = (pause.ended_ns - pause.began_ns) / 1e9
        seconds[pause.reason] += lasts_s / facts.num_steps

    return seconds


def _collections_of(stacks: StackSamples, seconds: float, num_steps: int) -> Collections | None:
    """The garbage collections of a step, which take this long together, and the line that ran in most of
    them: a call of `gc.collect()` is asked for."""
    if not stacks.collections:
        return None

    lines_ns: dict[SampledLine, float] = defaultdict(float)
    for collection in stacks.collections:
        line = stacks.lines[collection.line]
        if line.file:
            lines_ns[line] += collection.ended_ns - collection.began_ns

    costliest_line = max(lines_ns, key=lines_ns.__getitem__, default=None)
    return Collections(
        seconds=seconds,
        full=len(stacks.collections) / num_steps,
        source=place_of(costliest_line) if costliest_line else "",
        is_asked_for=costliest_line is not None and "collect(" in costliest_line.source,
    )


def _threads_of(facts: RankFacts, lasts_s: float) -> Iterator[BusyThread]:
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


# When samples ran


class SampleTimes:
    """When each sample of a stack began and ended, in the trace's time, and what happened then.

    What began in a sample belongs to its line: a kernel that the host launched then, too.
    """

    def __init__(self, stacks: StackSamples, trace: RankTrace) -> None:
        self.stacks = stacks
        self._trace = trace

        # A sample lasts until the next one.
        ends_ns = [sample.until_ns for sample in stacks.samples]
        edges_ns = np.array([stacks.began_ns, *ends_ns], dtype=np.float64)
        edges = (edges_ns - trace.base_ns) / 1e9
        self._starts = edges[:-1]
        self._ends = edges[1:]
        self.lasts_s = self._ends - self._starts
        self._phases = np.array([sample.phase for sample in stacks.samples])

    def within(self, intervals: Intervals) -> Numbers:
        """How much of each sample is in the set: of samples from 0 to 2 and 2 to 4, in `[[1, 3]]`, 1 and 1."""
        return length_until(intervals, self._ends) - length_until(intervals, self._starts)

    def sums(self, times: Numbers, seconds: Numbers) -> Numbers:
        """The sums over each sample of what begins at these times: three kernels that begin in the second
        sample are its own, wherever they end."""
        num_samples = len(self._ends)
        samples = np.searchsorted(self._ends, times, "right").clip(0, num_samples - 1)
        return np.bincount(samples, seconds, num_samples).astype(np.float64)

    def sampled(self, parts: Mapping[str, Intervals]) -> SampleSeconds:
        """What each sample took: the host's own time in it, and what was computed for it.

        `parts`: of the steps."""
        num_steps = len(self._trace.steps)
        return SampleSeconds(
            idle_s=self.within(parts[REST]) / num_steps,
            computes_s=self._computed(parts[COMPUTE]) / num_steps,
            differentiated_s=self._differentiated(parts[COMPUTE]) / num_steps,
        )

    def _computed(self, compute: Intervals) -> Numbers:
        """How long a rank computes for each sample."""
        if not self._trace.is_device:
            return self.within(compute)
        return self._launched(self._trace.launches)

    def _differentiated(self, compute: Intervals) -> Numbers:
        """The same, of operations that have a gradient."""
        differentiated = self._trace.differentiated
        if not self._trace.is_device:
            return self.within(intersection(compute, differentiated))

        launches = self._trace.launches
        has_gradient = contains(differentiated, launches[:, 0])
        return self._launched(launches[has_gradient])

    def _launched(self, rows: Intervals) -> Numbers:
        """How long the device computes for each sample: kernels that the host launched then. They
        may overlap, and together take as long as the device computes.

        `rows`: launch, start and end of each kernel."""
        steps = spans(self._trace.steps)
        starts = rows[:, 1]
        is_in_steps = (starts >= steps[0, 0]) & (starts < steps[-1, 1])
        launches, starts, ends = rows[is_in_steps].T
        kernels_s = self.sums(launches, ends - starts)

        kernels = intersection(steps, union(rows[:, 1:]))
        computes_s = length(intersection(self._trace.compute, kernels))
        sum_s = max(float(kernels_s.sum()), 1e-12)
        shares: Numbers = kernels_s * (computes_s / sum_s)

        return shares

    def communicated(self, communication: Intervals) -> Numbers:
        """How much of this communication belongs to each sample: on a GPU, where the host goes on,
        that of the collectives which it called then."""
        if not self._trace.is_device:
            return self.within(communication)

        called = []
        seconds = []
        for call in self._trace.collectives:
            called.append(call.call if call.host_call is None else call.host_call)
            seconds.append(length(clipped(communication, call.call, call.end)))

        return self.sums(np.array(called), np.array(seconds))

    def collections(self) -> Intervals:
        """The garbage collections."""
        base_ns = self._trace.base_ns
        return union(
            ((row.began_ns - base_ns) / 1e9, (row.ended_ns - base_ns) / 1e9)
            for row in self.stacks.collections
        )

    def is_in(self, phases: Sequence[str]) -> Mask:
        """Which samples are of these phases."""
        names = np.array(self.stacks.phases)[self._phases]
        return np.isin(names, phases)

    def steps(self) -> Integers:
        """The number of the step in which each sample ends, from 0."""
        starts = [step.start for step in self._trace.steps]
        return np.searchsorted(starts, self._ends).clip(1) - 1

    def operations(self) -> Integers:
        """How many operations begin in each sample."""
        return self._count(self._trace.host_operations[:, 0])

    def in_torch(self, idle_s: Numbers) -> Numbers:
        """How long each sample is in Python of torch that calls no operations: it reads a file,
        compiles, makes a process group."""
        is_torch = np.array(libraries_of(self.stacks)) == "torch"
        longer_s = idle_s - USUAL_CALL_S * self.operations() / len(self._trace.steps)
        seconds: Numbers = np.maximum(0.0, longer_s) * is_torch * self.is_in(FORWARD_PHASES)

        return seconds

    def shares_of_backward(self) -> Numbers:
        """Which part of the backward pass belongs to each sample, by the number of its operations
        that have a gradient."""
        counts = self._count(self._trace.differentiated[:, 0])
        shares: Numbers = counts / max(1, counts.sum())
        return shares

    def _count(self, times: Numbers) -> Integers:
        """How many of these times, in order, are in each sample."""
        before_ends = np.searchsorted(times, self._ends)
        before_starts = np.searchsorted(times, self._starts)
        return before_ends - before_starts

    def worker_starts(self) -> WorkerStarts | None:
        """A step in which workers start waits longer for its batch than the others: by how much, on average over
        all steps."""
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

    def by_phase(self, seconds: Numbers) -> dict[str, float]:
        """The sums of what the samples of each phase took: `{'forward': 0.012, 'backward': 0.021}`."""
        names = self.stacks.phases
        sums = np.bincount(self._phases, seconds, len(names)).tolist()
        seconds_of = dict(zip(names, sums, strict=True))

        return {name: phase_s for name, phase_s in seconds_of.items() if phase_s > 0}

    def cpu_shares(self) -> Numbers:
        """How much of each sample its thread was on a CPU."""
        cpu_ns = [sample.cpu_ns for sample in self.stacks.samples]
        cpu_s = np.array(cpu_ns) / 1e9
        shares: Numbers = cpu_s / np.maximum(self.lasts_s, 1e-9)

        return np.minimum(1.0, shares)


# Lines

SampleCosts = Mapping[str, Numbers]
"""What each sample costs, as means over the steps, by the fields of `LineCost`."""
OUR_LIBRARIES = ("torch", "drumline")
"""What they do is not the user's Python."""
MOST_LINES = 20
DIFFERENTIATED = 0.2
"""Of what code computes: with less in operations that have a gradient, it has none. Some of those
before and after it are in its first and last sample."""


def _lines_of_steps(
    times: SampleTimes, sampled: SampleSeconds, backward_s: Numbers
) -> list[LineCost]:
    """The functions of the user's code in the steps, with all that is known of them.

    LineCost(phase='forward', source='model.py:12', seconds=0.02, own_s=0.015, operations=3.0, ...)
    """
    stacks = times.stacks
    own_s = sampled.idle_s * is_user_s_own(stacks) + times.in_torch(sampled.idle_s)
    costs = {
        "seconds": sampled.seconds,
        "host_s": sampled.idle_s,
        "own_s": own_s,
        "cpu_s": own_s * times.cpu_shares(),
        "backward_s": backward_s,
    }
    operations = times.operations()
    steps = times.steps()

    lines = []
    for caller, samples in _functions(stacks, sampled.seconds):
        cost = _cost_of(stacks, costs, samples, caller)

        by_itself: list[int] = []
        by_library: list[int] = []
        for number in samples:
            line = line_of(stacks, number)
            if place_of(line) == cost.source:
                samples_of = by_library if line.library else by_itself
                samples_of.append(number)

        cost = replace(
            cost,
            operations=usual_count(operations, steps, by_itself),
            library_operations=usual_count(operations, steps, by_library),
        )
        lines.append(cost)

    return costliest_first(lines)


def _lines_of_pauses(facts: RankFacts, times: SampleTimes) -> list[LineCost]:
    """Those of evaluations and saves, which are in no step."""
    if not facts.pauses:
        return []

    paused_s = times.lasts_s * times.is_in(PAUSES) / facts.num_steps
    own_s = paused_s * is_user_s_own(facts.stacks)
    costs = {"seconds": paused_s, "own_s": own_s, "cpu_s": own_s * times.cpu_shares()}

    return costliest(facts.stacks, costs)


def place_of(line: SampledLine) -> str:
    """`train.py:7`."""
    return f"{line.file}:{line.line}"


def line_of(stacks: StackSamples, number: int) -> SampledLine:
    """The line of a sample."""
    return stacks.lines[stacks.samples[number].line]


def libraries_of(stacks: StackSamples) -> list[str]:
    """The library that runs in each sample; empty: none."""
    return [stacks.lines[sample.line].library for sample in stacks.samples]


def is_user_s_own(stacks: StackSamples) -> Mask:
    """In which samples neither torch nor Drumline runs."""
    return ~np.isin(libraries_of(stacks), OUR_LIBRARIES)


def costliest(stacks: StackSamples, costs: SampleCosts) -> list[LineCost]:
    """The functions of the user's code by their time in each phase, with the costliest line of
    each."""
    functions = _functions(stacks, costs["seconds"])
    return costliest_first(
        _cost_of(stacks, costs, samples, caller) for caller, samples in functions
    )


def _functions(stacks: StackSamples, seconds: Numbers) -> list[tuple[str, list[int]]]:
    """The samples of each function of the user's in each phase, and the line that called it; of all
    that one line called in a file, the samples together:

    [('', [0, 1, 4]), ('train.py:41', [2, 3])]
    """
    functions: dict[tuple[int, str, str, str], list[int]] = defaultdict(list)
    for number, sample in enumerate(stacks.samples):
        line = stacks.lines[sample.line]
        if line.file and seconds[number] > 0:
            caller = _caller_of(stacks, number)
            function = "" if caller else line.function
            functions[sample.phase, line.file, function, caller].append(number)

    return [(caller, samples) for (_, _, _, caller), samples in functions.items()]


def _caller_of(stacks: StackSamples, number: int) -> str:
    """The statement between the phases of a step that led to a sample, as in `train.py:41`: what it calls
    in a file is one cost. Empty: there is none, or it is in the function itself."""
    phase = stacks.phases[stacks.samples[number].phase]
    if not stacks.statements or phase != REST:
        return ""

    statement = stacks.lines[stacks.statements[number]]
    is_itself = statement.function == line_of(stacks, number).function
    if is_itself or not statement.file:
        return ""

    return place_of(statement)


def _cost_of(
    stacks: StackSamples, costs: SampleCosts, samples: Sequence[int], caller: str
) -> LineCost:
    """The sums over some samples, at their costliest line: a function is shown by the line that takes most
    of its time."""
    seconds = costs["seconds"]
    lines_s: dict[tuple[int, str], float] = defaultdict(float)
    for number in samples:
        phase = stacks.samples[number].phase
        lines_s[phase, place_of(line_of(stacks, number))] += seconds[number]

    phase, place = max(lines_s, key=lines_s.__getitem__)
    line = next(line for line in stacks.lines if place_of(line) == place)
    sums = {name: float(values[samples].sum()) for name, values in costs.items()}

    return LineCost(
        phase=stacks.phases[phase],
        source=place,
        function=line.function,
        text=line.source,
        caller=caller,
        **sums,
    )


def usual_count(counts: Integers, steps: Integers, samples: Sequence[int]) -> float:
    """The median over all steps: a sample that lasts long on a busy machine may have the operations
    of another line. Where three of five steps have 4, one has 9 and one has none, it is 4."""
    num_steps = int(steps.max()) + 1
    count_of_steps = np.bincount(steps[samples], counts[samples], num_steps)
    return float(np.median(count_of_steps))


def costliest_first(lines: Iterable[LineCost]) -> list[LineCost]:
    """The MOST_LINES lines that take longest."""
    return sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]


def _without_gradient(stacks: StackSamples, sampled: SampleSeconds) -> Iterator[LineCost]:
    """The user's statements that compute with torch and have no gradient, and functions in the
    others, by their costliest line."""
    # a captured step has no operations
    if not stacks.statements or not sampled.differentiated_s.any():
        return

    costs = {"seconds": sampled.seconds}
    functions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for statement, samples in _samples_of_statements(stacks).items():
        line = stacks.lines[statement]
        if not _has_gradient(sampled, samples):
            if line.file:
                yield _cost_of(stacks, costs, samples, place_of(line))
            continue

        for number in samples:
            line = line_of(stacks, number)
            if line.file:
                functions[line.file, line.function].append(number)

    for samples in functions.values():
        if not _has_gradient(sampled, samples):
            yield _cost_of(stacks, costs, samples, "")


def _samples_of_statements(stacks: StackSamples) -> dict[int, list[int]]:
    """The samples of each statement of the forward pass, by the number of its line."""
    statements: dict[int, list[int]] = defaultdict(list)
    for number, sample in enumerate(stacks.samples):
        if stacks.phases[sample.phase] in FORWARD_PHASES:
            statements[stacks.statements[number]].append(number)

    return statements


def _has_gradient(sampled: SampleSeconds, samples: Sequence[int]) -> bool:
    """Whether most of what these samples took is no computing, or enough of that has a gradient."""
    computed_s = sampled.computes_s[samples].sum()
    if computed_s < sampled.seconds[samples].sum() / 2:
        return True

    return bool(sampled.differentiated_s[samples].sum() >= DIFFERENTIATED * computed_s)


# All ranks together

ADDED = [field.name for field in fields(LineCost) if field.type == "float"]
"""What of the lines of several ranks is added up."""


def mean_over_ranks(ranks: Sequence[RankPhases]) -> RankPhases:
    """The threads are those of all ranks."""

    def lines(name: str) -> tuple[LineCost, ...]:
        """The means of one of the tables of lines."""
        return mean_lines([getattr(rank, name) for rank in ranks])

    return RankPhases(
        phases_s=mean_phases([rank.phases_s for rank in ranks]),
        lines=lines("lines"),
        communication_phases_s=mean_phases([rank.communication_phases_s for rank in ranks]),
        collective_lines=lines("collective_lines"),
        special_lines=lines("special_lines"),
        undifferentiated=lines("undifferentiated"),
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
    """The costs of each function and caller over all ranks, with the line of the rank where it costs most.
    A function that one of two ranks runs costs half as much."""
    by_function: dict[tuple[str, str, str, str], list[LineCost]] = defaultdict(list)
    for table in tables:
        for line in table:
            file = line.source.rpartition(":")[0]
            function = "" if line.caller else line.function
            by_function[line.phase, file, function, line.caller].append(line)

    means = []
    for lines in by_function.values():
        costliest_line = max(lines, key=lambda line: line.seconds)
        values = {}
        for name in ADDED:
            values[name] = sum(getattr(line, name) for line in lines) / len(tables)

        means.append(replace(costliest_line, **values))

    return tuple(costliest_first(means))


def _mean_cost(costs: Sequence[C | None]) -> C | None:
    """That of the rank where it takes longest, with the mean over all; None: no rank has it."""
    costs_of_ranks = [cost for cost in costs if cost is not None]
    if not costs_of_ranks:
        return None

    longest = max(costs_of_ranks, key=lambda cost: cost.seconds)
    sum_s = sum(cost.seconds for cost in costs_of_ranks)
    return replace(longest, seconds=sum_s / len(costs))
