"""One epoch of the ledger: which positions came twice or never, and whether its steps were whole batches in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from drumline.text import plural, span
from drumline.verify.findings import Part
from drumline.verify.history import FILE, Start
from drumline.verify.pieces import Piece

NAMED_FAULTS, NAMED_SAMPLES = 5, 5


class Fault(NamedTuple):
    """Positions [low, high) of an epoch that came twice, or never."""

    low: int
    high: int
    how: str


def with_counts_settled(pieces: list[Piece], part: Part) -> list[Piece]:
    """Where all finished epochs of a start end elsewhere than its number of samples says, that is told once, and the
    rest is checked against where they do end."""
    ends: dict[Start, dict[int, int]] = {}
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


def check_epoch(epoch: int, pieces: list[Piece], part: Part, *, begin: int, is_last: bool) -> None:
    """Each position from `begin` on exactly once: all of a finished epoch, the last one as far as it came."""
    num_problems = len(part.problems)
    start = pieces[-1].start
    ordered = sorted(pieces, key=lambda piece: (piece.low, piece.high))
    reached = max(piece.high for piece in pieces)
    end = reached if is_last or start.samples is None else start.samples
    _check_order_stayed(epoch, ordered, part)
    _tell(epoch, "never came", list(_gaps(ordered, begin, end)), start, part)
    _tell(epoch, "came twice", list(_overlaps(ordered, begin)), start, part)
    if start.samples is not None and reached > start.samples:
        what = (
            f"epoch {epoch + 1} goes on to position {reached - 1:,}, but there are {describe_samples(start)}"
        )
        part.problem(_at(ordered[-1]), what)
    if len(part.problems) == num_problems:
        _check_steps(epoch, pieces, part)


def _check_order_stayed(epoch: int, pieces: list[Piece], part: Part) -> None:
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


def _gaps(pieces: list[Piece], start: int, end: int) -> Iterator[Fault]:
    reached, before = start, "nothing came before it"
    for piece in pieces:
        if piece.low > reached:
            yield Fault(reached, piece.low, f"{before}, then came step {piece.step_at(piece.low):,}")
        if piece.high > reached:
            reached, before = piece.high, f"step {piece.last:,} ended there"
    if reached < end:
        yield Fault(reached, end, before)


def _overlaps(pieces: list[Piece], start: int) -> Iterator[Fault]:
    reached: Piece | None = None
    for piece in pieces:
        if piece.low < start and reached is None:
            high = min(start, piece.high)
            yield Fault(piece.low, high, f"in {piece.who(piece.low, high)}, and before the ledger begins")
        if reached is not None and piece.low < reached.high:
            low, high = piece.low, min(piece.high, reached.high)
            yield Fault(low, high, f"in {reached.who(low, high)}, and in {piece.who(low, high)}")
        if reached is None or piece.high > reached.high:
            reached = piece


def _tell(epoch: int, how_often: str, faults: list[Fault], start: Start, part: Part) -> None:
    for fault in faults[:NAMED_FAULTS]:
        named = _named_samples(epoch, fault, start)
        positions = span(fault.low, fault.high - 1, "position")
        part.problem(FILE, f"epoch {epoch + 1}: {positions}{named} {how_often}: {fault.how}")
    if rest := faults[NAMED_FAULTS:]:
        count = sum(fault.high - fault.low for fault in rest)
        more = f"{plural(count, 'more position')} {how_often}"
        part.problem(FILE, f"epoch {epoch + 1}: {more}, the last at {rest[-1].high - 1:,}: {rest[-1].how}")


def _named_samples(epoch: int, fault: Fault, start: Start) -> str:
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


def _check_steps(epoch: int, pieces: list[Piece], part: Part) -> None:
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


def describe_samples(start: Start) -> str:
    """How many samples a job had."""
    return "an unknown number of samples" if start.samples is None else plural(start.samples, "sample")


def _at(piece: Piece) -> str:
    return f"{FILE}, line {piece.line}"
