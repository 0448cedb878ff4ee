"""The phases of a rank's steps, and the user's lines in them: the time that the trace leaves to the
host, divided by the samples of its stack.

Communication and the wait for other ranks are the trace's; garbage collections are exact; all other
time belongs to the phase that the sampler saw. A GPU computes for the phase that launched the
kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from drumline.runs.profile_files import RankFacts, SampledLine, StackSamples
from drumline.runs.profile_result import PAUSES, BusyThread, Collections, LineCost
from drumline.tools.profile.intervals import (
    Intervals,
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
Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankPhases:
    """Of one rank, as means over its steps."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[LineCost, ...] = ()
    communication_phases_s: Mapping[str, float] = field(default_factory=dict)
    collective_lines: tuple[LineCost, ...] = ()
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
    computes_s = times.launched(trace, host.steps) if trace.is_device else times.within(host.busy)
    seconds = idle_s + computes_s / num_steps
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
            *costliest(stacks, seconds, idle_s, cpu_shares),
            *(costliest(stacks, paused_s, paused_s, cpu_shares) if facts.pauses else ()),
        ),
        communication_phases_s=times.by_phase(stacks, communicates_s),
        collective_lines=tuple(costliest(stacks, in_others_s, np.zeros_like(idle_s), cpu_shares)),
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

    def launched(self, trace: RankTrace, steps: Intervals) -> Seconds:
        """How long the device computes for each sample: kernels that the host launched then. They
        may overlap, and together take as long as the device computes."""
        seconds = np.zeros(len(self._ends))
        launches, starts, ends = trace.launches.T
        is_in_steps = (starts >= steps[0, 0]) & (starts < steps[-1, 1])
        numbers = np.searchsorted(self._ends, launches[is_in_steps]).clip(0, len(seconds) - 1)
        np.add.at(seconds, numbers, (ends - starts)[is_in_steps])
        computes_s = length(intersection(trace.compute, steps))
        shares: Seconds = seconds * (computes_s / max(float(seconds.sum()), 1e-12))
        return shares

    def collections(self, stacks: StackSamples) -> Intervals:
        return union(
            ((row.began_ns - self._base_ns) / 1e9, (row.ended_ns - self._base_ns) / 1e9)
            for row in stacks.collections
        )

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


def costliest(
    stacks: StackSamples, seconds: Seconds, idle_s: Seconds, cpu_shares: Seconds
) -> list[LineCost]:
    """The functions of the user's code by their time in each phase, with the costliest line of
    each. `seconds`, `idle_s`: of each sample, all and without any operation."""
    functions: dict[tuple[int, str, str], _FunctionCost] = defaultdict(_FunctionCost)
    rows = zip(stacks.samples, seconds.tolist(), idle_s.tolist(), cpu_shares.tolist(), strict=True)
    for sample, lasts_s, idle, cpu_share in rows:
        line = stacks.lines[sample.line]
        if not line.file or lasts_s <= 0:
            continue
        cost = functions[sample.phase, line.file, line.function]
        cost.seconds += lasts_s
        cost.lines[line] += lasts_s
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
    )


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
    """The costs of each function over all ranks, with the line of the rank where it costs most."""
    by_function: dict[tuple[str, str, str], list[LineCost]] = defaultdict(list)
    for line in (line for table in tables for line in table):
        file = line.source.rpartition(":")[0]
        by_function[line.phase, file, line.function].append(line)
    means = [
        replace(
            max(lines, key=lambda line: line.seconds),
            seconds=sum(line.seconds for line in lines) / num_ranks,
            own_s=sum(line.own_s for line in lines) / num_ranks,
            cpu_s=sum(line.cpu_s for line in lines) / num_ranks,
        )
        for lines in by_function.values()
    ]
    return sorted(means, key=lambda line: -line.seconds)[:MOST_LINES]


def mean_collections(ranks: Sequence[RankPhases]) -> Collections | None:
    costs = [phases.collections for phases in ranks if phases.collections is not None]
    if not costs:
        return None
    costliest_one = max(costs, key=lambda cost: cost.seconds)
    return Collections(
        seconds=sum(cost.seconds for cost in costs) / len(ranks),
        full=sum(cost.full for cost in costs) / len(ranks),
        source=costliest_one.source,
        is_asked_for=costliest_one.is_asked_for,
    )
