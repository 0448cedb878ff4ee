"""The heat map of a run: how much longer each rank's own work took than that of its peers, by rank
and time.

All ranks finish a step together, so that step times do not show a straggler. What differs is the
time that a rank spends on data, forward and optimizer: the others wait for it in backward
(watch/stragglers.py). A rank that is slow in backward alone, or a GPU whose host runs ahead of it,
does not show here; a profile shows those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from drumline.report.goodput import RunClock
from drumline.watch.heartbeat import Phase
from drumline.watch.stragglers import IN_STEPS

MAX_COLUMNS = 96
MAX_ROWS = 48
LEVELS = (0.03, 0.08, 0.15, 0.25, 0.4, 0.6)
"""The least excess of each colour, as a fraction of a step."""
MIN_EXCESS = LEVELS[1]
OWN_WORK = tuple(phase.name.lower() for phase in (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER))
STEP_PHASES = tuple(phase.name.lower() for phase in IN_STEPS)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """A `phases` event: the seconds of one rank, by phase, up to this time and step."""

    time: float
    step: int
    phases_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class HeatRow:
    """A rank."""

    rank: int
    host: str
    cells: tuple[float | None, ...]
    """By time: the excess as a fraction of the step; None: it took no step."""
    step_s: Mapping[str, float]
    """The mean of each phase over all its steps, in seconds a step."""

    @property
    def slow_cells(self) -> int:
        return sum(cell is not None and cell >= MIN_EXCESS for cell in self.cells)

    @property
    def excess(self) -> float:
        """The mean over the intervals in which it was slow."""
        slow = [cell for cell in self.cells if cell is not None and cell >= MIN_EXCESS]
        return sum(slow) / len(slow) if slow else 0.0


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    rows: tuple[HeatRow, ...]
    """Of many ranks those that are slowest, in the order of ranks."""
    num_hidden: int
    column_s: float

    @property
    def slow_ranks(self) -> list[HeatRow]:
        """Those that were slow for long enough to be seen: a tenth of the time, and three
        intervals."""
        found = [row for row in self.rows if row.slow_cells >= max(3, len(row.cells) / 10)]
        return sorted(found, key=lambda row: -row.excess * row.slow_cells)


def level_of(cell: float | None) -> int | None:
    """The colour of a cell, from 0."""
    return None if cell is None else sum(cell >= least for least in LEVELS)


def make_heat_map(
    phases: Mapping[int, Sequence[PhaseTimes]],
    hosts: Mapping[int, str],
    clock: RunClock,
    *,
    most_rows: int = MAX_ROWS,
    most_columns: int = MAX_COLUMNS,
) -> HeatMap:
    num_columns = min(most_columns, max((len(times) for times in phases.values()), default=1))
    column_s = max(clock.seconds / max(1, num_columns), 1e-9)
    fractions = {
        rank: _own_fractions(times, clock, column_s, num_columns) for rank, times in phases.items()
    }
    usual = [
        median_low(found)
        if (found := [one[column] for one in fractions.values() if column in one])
        else 0.0
        for column in range(num_columns)
    ]
    rows = [
        HeatRow(
            rank=rank,
            host=hosts.get(rank, ""),
            cells=tuple(
                of_rank[column] - usual[column] if column in of_rank else None
                for column in range(num_columns)
            ),
            step_s=mean_phases(phases[rank]),
        )
        for rank, of_rank in sorted(fractions.items())
    ]
    shown = sorted(
        sorted(rows, key=lambda row: -row.excess * row.slow_cells)[:most_rows],
        key=lambda row: row.rank,
    )
    return HeatMap(rows=tuple(shown), num_hidden=len(rows) - len(shown), column_s=column_s)


def _own_fractions(
    times: Sequence[PhaseTimes], clock: RunClock, column_s: float, most: int
) -> dict[int, float]:
    """By column: the fraction of the time in steps that was the rank's own work. A long interval is
    in many columns."""
    own: dict[int, float] = defaultdict(float)
    total: dict[int, float] = defaultdict(float)
    for one in times:
        in_steps = sum(one.phases_s.get(name, 0.0) for name in STEP_PHASES)
        if in_steps <= 0:
            continue
        fraction = sum(one.phases_s.get(name, 0.0) for name in OWN_WORK) / in_steps
        end = clock.at(one.time)
        begin = max(0.0, end - in_steps)
        first, last = (min(most - 1, int(moment / column_s)) for moment in (begin, end))
        for column in range(first, last + 1):
            overlap = min(end, (column + 1) * column_s) - max(begin, column * column_s)
            if overlap > 0:
                own[column] += fraction * overlap
                total[column] += overlap
    return {column: own[column] / total[column] for column in total}


def mean_phases(times: Sequence[PhaseTimes]) -> dict[str, float]:
    """Seconds a step by phase, of intervals that follow one another: not the first of each
    start."""
    sums: dict[str, float] = defaultdict(float)
    num_steps = 0
    for before, after in pairwise(times):
        is_next = sum(after.phases_s.values()) > (after.time - before.time) / 2
        if after.step > before.step and is_next:
            num_steps += after.step - before.step
            for name in STEP_PHASES:
                sums[name] += after.phases_s.get(name, 0.0)
    return {name: seconds / num_steps for name, seconds in sums.items() if seconds > 0}
