"""Stretches of steps as pieces of an epoch: how much of its order was covered, by which steps and ranks.

As long as the shares of all ranks make up one global batch after another, a piece is as long as the run is: nothing is
looked at step by step. Where they do not, there is a piece for each share, so that what is wrong can be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from drumline.data.ledger import Run
from drumline.text import span
from drumline.verify.history import Start, Stretch

MOST_PIECES = 100_000
"""Of what does not fit together; by then more than enough is known to be wrong, and the rest is taken as it looks."""


@dataclass(frozen=True)
class Piece:
    """The positions [low, high) of an epoch, covered by steps from `first` on that take `stride` each."""

    epoch: int
    low: int
    high: int
    first: int
    stride: int
    is_regular: bool
    """Whether all ranks together made up the global batch of every step."""
    runs: tuple[tuple[int, Run], ...]
    """By rank."""
    start: Start
    line: int

    @property
    def last(self) -> int:
        return self.step_at(self.high - 1)

    def step_at(self, position: int) -> int:
        return self.first + (position - self.low) // self.stride

    def who(self, low: int, high: int) -> str:
        """In which steps and on which ranks some of its positions came."""
        first, last = self.step_at(low), self.step_at(high - 1)
        steps = range(first, min(last, first + 2) + 1)  # three steps in a row show every rank there is
        moved = [(rank, run.piece(step - self.first, 1)) for rank, run in self.runs for step in steps]
        ranks = sorted({rank for rank, run in moved if max(run.low, low) < min(run.high, high)})
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{span(first, last, 'step')} on {named}"


def pieces_of(stretches: list[Stretch]) -> Iterator[Piece]:
    """All pieces in the order of their steps."""
    room = MOST_PIECES
    for stretch in stretches:
        for first, runs in _blocks(stretch):
            if _makes_up_batches(runs) or room < 0:
                yield _regular(stretch, first, runs)
                continue
            for piece in _irregular(stretch, first, runs):
                room -= 1
                yield piece


def empty_steps(stretches: list[Stretch]) -> Iterator[tuple[int, int]]:
    """Steps in which no rank had a sample, with their lines: no run takes such a step, and no piece tells of it."""
    for stretch in stretches:
        for first, runs in _blocks(stretch):
            if not any(run.high > run.low for run in runs):
                yield stretch.line, first


def _blocks(stretch: Stretch) -> Iterator[tuple[int, list[Run]]]:
    """Steps during which every rank is in one run: the first of them, and the ranks' runs cut to their number."""
    left = [list(runs) for runs in stretch.ranks]
    first = stretch.first
    while all(left):
        count = min(runs[0].steps for runs in left)
        yield first, [runs[0].piece(0, count) for runs in left]
        for runs in left:
            rest = runs[0].piece(count, runs[0].steps - count)
            runs[:1] = [rest] if rest.steps else []
        first += count


def _makes_up_batches(runs: list[Run]) -> bool:
    """All move alike, so if the first step is right, all of them are."""
    if len({(run.epoch, run.stride) for run in runs}) > 1:
        return False
    shares = sorted((run.low, run.high) for run in runs if run.high > run.low)
    fits = all(left[1] == right[0] for left, right in pairwise(shares))
    return bool(shares) and fits and shares[-1][1] - shares[0][0] == runs[0].stride


def _regular(stretch: Stretch, first: int, runs: list[Run]) -> Piece:
    run = runs[0]
    low = min((run.low for run in runs if run.high > run.low), default=run.low)
    named = tuple(enumerate(runs))
    high = low + run.stride * run.steps
    return Piece(run.epoch, low, high, first, run.stride, True, named, stretch.start, stretch.line)


def _irregular(stretch: Stretch, first: int, runs: list[Run]) -> Iterator[Piece]:
    for number in range(runs[0].steps):
        for rank, run in enumerate(run.piece(number, 1) for run in runs):
            if run.high > run.low:
                yield Piece(
                    run.epoch,
                    run.low,
                    run.high,
                    first=first + number,
                    stride=run.high - run.low,
                    is_regular=False,
                    runs=((rank, run),),
                    start=stretch.start,
                    line=stretch.line,
                )
