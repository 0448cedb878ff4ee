"""Stretches of steps as pieces of an epoch: how much of its order was covered, by which steps and ranks.

As long as the shares of all ranks make up one global batch after another, a piece is as long as the run is: nothing is
looked at step by step. Where they do not, there is a piece for each share, so that what is wrong can be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from drumline.audit.ledger_history import FILE, LedgerStart, StepRange
from drumline.audit.section import Section
from drumline.data.ledger import LedgerEntry
from drumline.text import plural, span

MOST_PIECES = 100_000
"""Of what does not fit together; by then more than enough is known to be wrong, and the rest is taken as it looks."""


@dataclass(frozen=True)
class EpochPiece:
    """The positions [low, high) of an epoch, covered by steps from `first` on that take `stride` each."""

    epoch: int
    low: int
    high: int
    first: int
    stride: int
    is_regular: bool
    """Whether all ranks together made up the global batch of every step."""
    runs: tuple[tuple[int, LedgerEntry], ...]
    """By rank."""
    start: LedgerStart
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
        moved = [(rank, run.slice(step - self.first, 1)) for rank, run in self.runs for step in steps]
        ranks = sorted({rank for rank, run in moved if max(run.low, low) < min(run.high, high)})
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{span(first, last, 'step')} on {named}"


def pieces_of(stretches: list[StepRange]) -> Iterator[EpochPiece]:
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


def empty_steps(stretches: list[StepRange]) -> Iterator[tuple[int, int]]:
    """Steps in which no rank had a sample, with their lines: no run takes such a step, and no piece tells of it."""
    for stretch in stretches:
        for first, runs in _blocks(stretch):
            if not any(run.high > run.low for run in runs):
                yield stretch.line, first


def _blocks(stretch: StepRange) -> Iterator[tuple[int, list[LedgerEntry]]]:
    """Steps during which every rank is in one run: the first of them, and the ranks' runs cut to their number."""
    left = [list(runs) for runs in stretch.ranks]
    first = stretch.first
    while all(left):
        count = min(runs[0].steps for runs in left)
        yield first, [runs[0].slice(0, count) for runs in left]
        for runs in left:
            rest = runs[0].slice(count, runs[0].steps - count)
            runs[:1] = [rest] if rest.steps else []
        first += count


def _makes_up_batches(runs: list[LedgerEntry]) -> bool:
    """All move alike, so if the first step is right, all of them are."""
    if len({(run.epoch, run.stride) for run in runs}) > 1:
        return False
    shares = sorted((run.low, run.high) for run in runs if run.high > run.low)
    fits = all(left[1] == right[0] for left, right in pairwise(shares))
    return bool(shares) and fits and shares[-1][1] - shares[0][0] == runs[0].stride


def _regular(stretch: StepRange, first: int, runs: list[LedgerEntry]) -> EpochPiece:
    run = runs[0]
    low = min((run.low for run in runs if run.high > run.low), default=run.low)
    named = tuple(enumerate(runs))
    high = low + run.stride * run.steps
    return EpochPiece(run.epoch, low, high, first, run.stride, True, named, stretch.start, stretch.line)


def _irregular(stretch: StepRange, first: int, runs: list[LedgerEntry]) -> Iterator[EpochPiece]:
    for number in range(runs[0].steps):
        for rank, run in enumerate(run.slice(number, 1) for run in runs):
            if run.high > run.low:
                yield EpochPiece(
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


NAMED_FAULTS, NAMED_SAMPLES = 5, 5


class CoverageFault(NamedTuple):
    """Positions [low, high) of an epoch that came twice, or never."""

    low: int
    high: int
    how: str


def with_counts_settled(pieces: list[EpochPiece], part: Section) -> list[EpochPiece]:
    """Where all finished epochs of a start end elsewhere than its number of samples says, that is told once, and the
    rest is checked against where they do end."""
    ends: dict[LedgerStart, dict[int, int]] = {}
    for piece in pieces:
        of_start = ends.setdefault(piece.start, {})
        of_start[piece.epoch] = max(piece.high, of_start.get(piece.epoch, 0))
    settled = {}
    for start, reached in ends.items():
        epochs = sorted(reached)[:-1]  # the last may go on elsewhere
        end = reached[epochs[0]] if epochs else start.samples
        if start.samples is None or len(epochs) < 2 or {reached[epoch] for epoch in epochs} != {end}:
            continue
        if end != start.samples:
            every = f"each of {span(epochs[0] + 1, epochs[-1] + 1, 'epoch')} ended after {plural(end or 0, 'sample')}"
            part.problem(f"{FILE}, line {start.line}", f"{describe_samples(start)}, but {every}")
            settled[start] = replace(start, samples=end)
    return [replace(piece, start=settled.get(piece.start, piece.start)) for piece in pieces]


def check_epoch(epoch: int, pieces: list[EpochPiece], part: Section, *, begin: int, is_last: bool) -> None:
    """Each position from `begin` on exactly once: all of a finished epoch, the last one as far as it came."""
    num_problems = len(part.problems)
    start = pieces[-1].start
    ordered = sorted(pieces, key=lambda piece: (piece.low, piece.high))
    reached = max(piece.high for piece in pieces)
    end = reached if is_last or start.samples is None else start.samples
    _check_order_stayed(epoch, ordered, part)
    _report_faults(epoch, "never came", list(_gaps(ordered, begin, end)), start, part)
    _report_faults(epoch, "came twice", list(_overlaps(ordered, begin)), start, part)
    if start.samples is not None and reached > start.samples:
        what = (
            f"epoch {epoch + 1} goes on to position {reached - 1:,}, but there are {describe_samples(start)}"
        )
        part.problem(_at(ordered[-1]), what)
    if len(part.problems) == num_problems:
        _check_steps(epoch, pieces, part)


def _check_order_stayed(epoch: int, pieces: list[EpochPiece], part: Section) -> None:
    starts = list(dict.fromkeys(piece.start for piece in pieces))
    for before, now in pairwise(starts):
        changed = []
        if before.samples != now.samples:
            changed.append(
                f"{describe_samples(before)} before step {now.step + 1:,}, {describe_samples(now)} after"
            )
        if before.seed != now.seed:
            changed.append(f"the seed {before.seed} before step {now.step + 1:,}, {now.seed} after")
        for change in changed:
            part.problem(
                f"{FILE}, line {now.line}",
                f"epoch {epoch + 1} changed its order on the way, so samples may have come twice or never: {change}",
            )


def _gaps(pieces: list[EpochPiece], start: int, end: int) -> Iterator[CoverageFault]:
    reached, before = start, "nothing came before it"
    for piece in pieces:
        if piece.low > reached:
            yield CoverageFault(reached, piece.low, f"{before}, then came step {piece.step_at(piece.low):,}")
        if piece.high > reached:
            reached, before = piece.high, f"step {piece.last:,} ended there"
    if reached < end:
        yield CoverageFault(reached, end, before)


def _overlaps(pieces: list[EpochPiece], start: int) -> Iterator[CoverageFault]:
    reached: EpochPiece | None = None
    for piece in pieces:
        if piece.low < start and reached is None:
            high = min(start, piece.high)
            yield CoverageFault(
                piece.low, high, f"in {piece.who(piece.low, high)}, and before the ledger begins"
            )
        if reached is not None and piece.low < reached.high:
            low, high = piece.low, min(piece.high, reached.high)
            yield CoverageFault(low, high, f"in {reached.who(low, high)}, and in {piece.who(low, high)}")
        if reached is None or piece.high > reached.high:
            reached = piece


def _report_faults(
    epoch: int, how_often: str, faults: list[CoverageFault], start: LedgerStart, part: Section
) -> None:
    for fault in faults[:NAMED_FAULTS]:
        named = _named_samples(epoch, fault, start)
        positions = span(fault.low, fault.high - 1, "position")
        part.problem(FILE, f"epoch {epoch + 1}: {positions}{named} {how_often}: {fault.how}")
    if rest := faults[NAMED_FAULTS:]:
        count = sum(fault.high - fault.low for fault in rest)
        more = f"{plural(count, 'more position')} {how_often}"
        part.problem(FILE, f"epoch {epoch + 1}: {more}, the last at {rest[-1].high - 1:,}: {rest[-1].how}")


def _named_samples(epoch: int, fault: CoverageFault, start: LedgerStart) -> str:
    """The samples at some positions, by their index in the dataset; a stream has no index."""
    if start.samples is None or fault.low >= start.samples:
        return ""
    import numpy as np

    from drumline.data.permutation import permute

    high = min(fault.high, start.samples)
    positions = np.arange(fault.low, min(high, fault.low + NAMED_SAMPLES), dtype=np.int64)
    indices = permute(positions, length=start.samples, seed=start.seed, epoch=epoch).tolist()
    rest = high - fault.low - len(indices)
    more = f" and {rest:,} more" if rest else ""
    return f" (sample{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}{more})"


def _check_steps(epoch: int, pieces: list[EpochPiece], part: Section) -> None:
    """Each position came once; did each step have its own global batch, in the right order?"""
    for piece in pieces:
        if not piece.is_regular:
            part.problem(_at(piece), f"step {piece.first:,}: the ranks' shares are not one global batch")
            return
    for before, piece in pairwise(pieces):
        if piece.low != before.high:
            began = f"step {piece.first:,} began at position {piece.low:,} of epoch {epoch + 1}"
            part.problem(_at(piece), f"{began}, but step {before.last:,} ended at {before.high:,}")
            return
    for piece in pieces:
        is_short_end = (
            piece is pieces[-1] and piece.first == piece.last and piece.stride < piece.start.batch_size
        )
        ends = piece.start.samples is None or piece.high == piece.start.samples
        if piece.stride != piece.start.batch_size and not (is_short_end and ends):
            what = f"step {piece.first:,} had a global batch of {piece.stride:,}"
            part.problem(_at(piece), f"{what}, not of {piece.start.batch_size:,}")


def describe_samples(start: LedgerStart) -> str:
    """How many samples a job had."""
    return "an unknown number of samples" if start.samples is None else plural(start.samples, "sample")


def _at(piece: EpochPiece) -> str:
    return f"{FILE}, line {piece.line}"
