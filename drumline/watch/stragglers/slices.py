"""The run's time cut into slices of a step or more, and what part of each slice every rank spent in which phase.

Beats say how long a rank has been in each phase since its start. Two pictures, a little apart, say where the time in
between went. Ranks of one job take their steps together, so whatever part one of them spends less in one phase it
spends more in another: parts of the same seconds can be compared, wherever the steps begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from drumline.watch.beats.phase import Phase
from drumline.watch.facts import Picture, RankFacts

IN_STEPS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN, Phase.USER)
"""Evaluations and saves are no part of a step: one rank does more of them than the others, and is to."""
STEPS_OF_SLICE, SECONDS_OF_SLICE = 1, 0.4
# Libraries are loaded, kernels chosen and buffers made in the first ones.
FIRST_STEPS = 5


@dataclass(frozen=True)
class Slice:
    """Some seconds of a run in which every rank took a step or more."""

    seconds: float
    num_steps: float
    parts: Mapping[int, tuple[float, ...]]
    """By rank, then by phase: of 1."""

    @property
    def in_steps(self) -> float:
        """The part of the time that went to steps."""
        return median(sum(parts[phase] for phase in IN_STEPS) for parts in self.parts.values())

    @property
    def step_s(self) -> float:
        return self.seconds * self.in_steps / self.num_steps


class Slices:
    """Takes pictures as they come, about twice a second."""

    def __init__(self) -> None:
        self._first: dict[int, RankFacts] = {}
        self._begin: dict[int, RankFacts] = {}

    def look(self, picture: Picture) -> Slice | None:
        """A slice, when this picture ends one."""
        now = {facts.rank: facts for facts in picture.ranks if facts.spent_s}
        if not _go_on(self._first, now):
            self._first, self._begin = now, {}
        if not self._begin:
            if all(facts.step - self._first[rank].step >= FIRST_STEPS for rank, facts in now.items()):
                self._begin = now
            return None
        spent = {rank: _spent(self._begin[rank], facts) for rank, facts in now.items()}
        steps = [facts.step - self._begin[rank].step for rank, facts in now.items()]
        seconds = [sum(of_rank) for of_rank in spent.values()]
        if min(steps) < STEPS_OF_SLICE or min(seconds) < SECONDS_OF_SLICE:
            return None
        self._begin = now
        parts = {rank: tuple(one / sum(of_rank) for one in of_rank) for rank, of_rank in spent.items()}
        return Slice(median(seconds), median(steps), parts)


def together(slices: Sequence[Slice]) -> Slice:
    """Several slices of the same ranks as one."""
    seconds = sum(one.seconds for one in slices)

    def parts(rank: int) -> tuple[float, ...]:
        weighted = [[part * one.seconds for part in one.parts[rank]] for one in slices]
        return tuple(sum(of_phase) / seconds for of_phase in zip(*weighted, strict=True))

    return Slice(
        seconds, sum(one.num_steps for one in slices), {rank: parts(rank) for rank in slices[0].parts}
    )


def _go_on(before: Mapping[int, RankFacts], now: Mapping[int, RankFacts]) -> bool:
    """Whether these are the same processes, further on."""
    return before.keys() == now.keys() and all(
        before[rank].pid == facts.pid and before[rank].step <= facts.step for rank, facts in now.items()
    )


def _spent(begin: RankFacts, end: RankFacts) -> list[float]:
    """Never less than nothing: a record that is read while it is written may be off by a phase."""
    return [max(0.0, late - early) for early, late in zip(_totals(begin), _totals(end), strict=True)]


def _totals(facts: RankFacts) -> list[float]:
    totals = list(facts.spent_s)
    totals[facts.phase] += facts.age_s  # what the record does not count yet
    return totals
