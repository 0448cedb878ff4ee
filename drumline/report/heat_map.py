"""The heat map of a run: how much longer each rank's own work took than that of its peers, by rank
and time.

All ranks finish a step together, so that step times do not show a straggler. What differs is the
time that a rank spends on data, forward and optimizer: the others wait for it in backward
(watch/stragglers.py). A rank that is slow in backward alone, or a GPU whose host runs ahead of it,
does not show here; a profile shows those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    """The Unix time at its end."""
    step: int
    phases_s: Mapping[str, float]

    def sum_of(self, phases: Iterable[str]) -> float:
        """The seconds in these phases."""
        return sum(self.phases_s.get(name, 0.0) for name in phases)


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
    def _slow(self) -> list[float]:
        return [cell for cell in self.cells if cell is not None and cell >= MIN_EXCESS]

    @property
    def slow_cells(self) -> int:
        """In how many intervals it was slow."""
        return len(self._slow)

    @property
    def slowness(self) -> float:
        """For the order of ranks: how much slower, times how long."""
        return sum(self._slow)

    @property
    def excess(self) -> float:
        """The mean over the intervals in which it was slow."""
        return self.slowness / self.slow_cells if self.slow_cells else 0.0


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The excess of each rank, by time."""

    rows: tuple[HeatRow, ...]
    """Of many ranks those that are slowest, in the order of ranks."""
    num_hidden: int
    """The other ranks."""
    column_s: float
    """The time that each cell is for."""

    @property
    def slow_ranks(self) -> list[HeatRow]:
        """Those that were slow for long enough to be seen: a tenth of the time, and three
        intervals."""
        slow_rows = [row for row in self.rows if row.slow_cells >= max(3, len(row.cells) / 10)]
        return sorted(slow_rows, key=lambda row: row.slowness, reverse=True)


def level_of(cell: float | None) -> int | None:
    """The colour of a cell, from 0."""
    return None if cell is None else sum(cell >= least for least in LEVELS)


def make_heat_map(
    phases: Mapping[int, Sequence[PhaseTimes]],
    hosts: Mapping[int, str],
    clock: RunClock,
    *,
    most_rows: int = MAX_ROWS,
) -> HeatMap:
    """From the `phases` events of each rank."""
    most_intervals = max((len(times) for times in phases.values()), default=1)
    num_columns = min(MAX_COLUMNS, most_intervals)
    column_s = max(clock.seconds / max(1, num_columns), 1e-9)

    fractions = {
        rank: _own_fractions(times, clock, column_s, num_columns) for rank, times in phases.items()
    }
    usual = [_usual_fraction(fractions.values(), column) for column in range(num_columns)]

    rows = []
    for rank, by_column in sorted(fractions.items()):
        cells = [
            by_column[column] - usual[column] if column in by_column else None
            for column in range(num_columns)
        ]
        rows.append(
            HeatRow(
                rank=rank,
                host=hosts.get(rank, ""),
                cells=tuple(cells),
                step_s=mean_phases(phases[rank]),
            )
        )

    slowest = sorted(rows, key=lambda row: row.slowness, reverse=True)[:most_rows]
    shown = sorted(slowest, key=lambda row: row.rank)
    return HeatMap(
        rows=tuple(shown),
        num_hidden=len(rows) - len(shown),
        column_s=column_s,
    )


def _usual_fraction(fractions: Iterable[Mapping[int, float]], column: int) -> float:
    """The median of the ranks that took steps in this column; 0: none did."""
    in_column = [by_column[column] for by_column in fractions if column in by_column]
    return median_low(in_column) if in_column else 0.0


def _own_fractions(
    times: Sequence[PhaseTimes],
    clock: RunClock,
    column_s: float,
    most: int,
) -> dict[int, float]:
    """By column: the fraction of the time in steps that was the rank's own work. A long interval is
    in many columns."""
    own_work_s: dict[int, float] = defaultdict(float)
    total_s: dict[int, float] = defaultdict(float)
    for interval in times:
        in_steps_s = interval.sum_of(STEP_PHASES)
        if in_steps_s <= 0:
            continue

        own_fraction = interval.sum_of(OWN_WORK) / in_steps_s
        end = clock.at(interval.time)
        begin = max(0.0, end - in_steps_s)
        first_column = min(most - 1, int(begin / column_s))
        last_column = min(most - 1, int(end / column_s))
        for column in range(first_column, last_column + 1):
            column_begin = column * column_s
            column_end = (column + 1) * column_s
            overlap_s = min(end, column_end) - max(begin, column_begin)
            if overlap_s > 0:
                own_work_s[column] += own_fraction * overlap_s
                total_s[column] += overlap_s

    return {column: own_work_s[column] / total_s[column] for column in total_s}


def mean_phases(times: Sequence[PhaseTimes]) -> dict[str, float]:
    """Seconds a step by phase, of intervals that follow one another: not the first of each
    start."""
    sums: dict[str, float] = defaultdict(float)
    num_steps = 0
    for before, after in pairwise(times):
        reported_s = sum(after.phases_s.values())
        is_next = reported_s > (after.time - before.time) / 2
        if after.step > before.step and is_next:
            num_steps += after.step - before.step
            for name in STEP_PHASES:
                sums[name] += after.phases_s.get(name, 0.0)

    return {name: seconds / num_steps for name, seconds in sums.items() if seconds > 0}
