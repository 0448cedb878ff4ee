"""Replays the sample ledger: every sample exactly once an epoch, over all restarts and world sizes.

After a kill a run resumes from its last checkpoint. Later steps that are recorded before that start
are void: they are repeated, and recorded again after it. The ranks advance alike in all steps of a
block, so one piece covers these, and they are not checked one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from drumline.base import untrusted
from drumline.base.text import join_names, named_ranks, plural, span
from drumline.report.verify.checkpoint_check import SavedPosition
from drumline.report.verify.event_check import Count
from drumline.report.verify.section import Section
from drumline.runs.events import read_json_lines
from drumline.runs.ledger_entries import LedgerEntry, from_json, num_steps

FILE = "ledger.jsonl"
NAMED_FAULTS = 5
NAMED_SAMPLES = 5


# The ledger


class LostSteps(NamedTuple):
    """Steps of a rank that was lost."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class LedgerStart:
    """A start of the job, as the ledger has it."""

    line: int = 0
    step: Count
    epoch: Count
    position: Count
    world_size: Count
    batch_size: Count
    samples: Count | None = None
    """None: a stream of unknown length."""
    seed: int
    lost: tuple[LostSteps, ...] = ()
    """What was lost with nodes that the others continued without."""


@dataclass(frozen=True)
class StepsRecord:
    """Some steps, as the ledger has them."""

    first: Count
    last: Count
    ranks: Annotated[list[Any], msgspec.Meta(min_length=1)]
    unsaved: bool = False


@dataclass(frozen=True)
class EpochPiece:
    """The steps from `first` to `last`, which take the positions of an epoch from `low` on, `stride`
    each."""

    epoch: int
    low: int
    stride: int
    first: int
    last: int
    runs: Sequence[LedgerEntry]
    """By rank, from the first step on."""
    start: LedgerStart
    line: int

    @property
    def high(self) -> int:
        """Where the next piece of the epoch begins."""
        return self.end_of(self.last)

    def end_of(self, step: int) -> int:
        """The first position that is not covered when this step is done."""
        return self.low + (step - self.first + 1) * self.stride

    def step_at(self, position: int) -> int:
        """The step that covers a position."""
        return self.first + (position - self.low) // self.stride

    def steps_and_ranks(self, low: int, high: int) -> str:
        """The steps and ranks that covered these positions."""
        first = self.step_at(low)
        last = self.step_at(high - 1)
        ranks = set()
        # three steps include every rank
        for step in range(first, min(last, first + 2) + 1):
            for rank, run in enumerate(self.runs):
                moved = run.slice(step - self.first, 1)
                if max(moved.low, low) < min(moved.high, high):
                    ranks.add(rank)
        return f"{span(first, last, 'step')} on {named_ranks(sorted(ranks))}"


@dataclass
class History:
    """The starts of a run, and its valid steps in order."""

    starts: list[LedgerStart] = field(default_factory=list)
    pieces: list[EpochPiece] = field(default_factory=list)
    saved_steps: set[int] = field(default_factory=set)
    """Steps of which there may be a checkpoint, also void ones."""

    @property
    def last_step(self) -> int:
        """The last that is recorded, or that the run resumed from."""
        last_recorded = self.pieces[-1].last if self.pieces else 0
        last_start = self.starts[-1].step if self.starts else 0
        return max(last_recorded, last_start)


def read_history(path: Path, section: Section) -> History:
    """Replay a ledger; damaged lines and steps that are missing or recorded twice become
    problems."""
    history = History()
    for line in read_json_lines(path):
        where = line_of(line.number)
        if line.record is None:
            section.note(where, "incomplete: cut off by a kill or a full disk")
            continue

        kind = line.record.get("kind")
        try:
            if kind == "start":
                start = untrusted.from_json(LedgerStart, line.record)
                _add_start(history, replace(start, line=line.number), section)
            elif kind != "steps":
                what = f"its kind is {kind!r}, which this version of Drumline does not know"
                section.problem(where, what)
            elif not history.starts:
                section.problem(where, "steps, but no start of a job above them")
            else:
                record = untrusted.from_json(StepsRecord, line.record)
                _add_steps(history, record, line.number, section)
        except ValueError as error:
            section.problem(where, f"damaged: {error}")

    return history


def line_of(number: int) -> str:
    """Where a line of the ledger is."""
    return f"{FILE}, line {number}"


def _add_start(history: History, start: LedgerStart, section: Section) -> None:
    """Steps after it are void: they are repeated."""
    if start.step > history.last_step:
        lost = span(history.last_step + 1, start.step, "step")
        what = f"the run resumed from step {start.step:,}; not recorded: {lost}"
        section.problem(line_of(start.line), what)

    history.starts.append(start)
    history.saved_steps.add(start.step)
    history.pieces = [
        replace(piece, last=min(piece.last, start.step))
        for piece in history.pieces
        if piece.first <= start.step
    ]


def _add_steps(history: History, record: StepsRecord, line: int, section: Section) -> None:
    """These steps follow those above them; a ValueError if a rank has more or fewer."""
    ranks = [from_json(entries) for entries in record.ranks]
    for rank, runs in enumerate(ranks):
        if num_steps(runs) != record.last - record.first + 1:
            steps = span(record.first, record.last, "step")
            raise ValueError(f"{steps}, but rank {rank} has {num_steps(runs)}")

    start = history.starts[-1]
    expected = history.last_step + 1
    where = line_of(line)
    if len(ranks) != start.world_size:
        section.problem(where, f"{len(ranks)} ranks, but the job had {start.world_size}")
    if record.first > expected:
        section.problem(where, f"not recorded above it: {span(expected, record.first - 1, 'step')}")
    elif record.first < expected:
        again = span(record.first, min(expected - 1, record.last), "step")
        section.problem(where, f"recorded twice: {again}")

    if not record.unsaved:
        history.saved_steps.add(record.last)
    first = record.first
    for count, block in _blocks(ranks):
        epoch = block[0].epoch
        stride = block[0].stride
        low = min((run.low for run in block if run.high > run.low), default=block[0].low)
        last = first + count - 1
        piece = EpochPiece(epoch, low, stride, first, last, block, start, line)
        history.pieces.append(piece)
        first += count


def _blocks(ranks: list[list[LedgerEntry]]) -> Iterator[tuple[int, list[LedgerEntry]]]:
    """Blocks of steps in which every rank has one entry: how many steps, and the entries from the
    first of them on."""
    left = [list(runs) for runs in ranks]
    while all(left):
        count = min(runs[0].steps for runs in left)
        yield count, [runs[0] for runs in left]
        for runs in left:
            rest = runs[0].slice(count, runs[0].steps - count)
            runs[:1] = [rest] if rest.steps else []


class CoverageFault(NamedTuple):
    """Positions [low, high) of an epoch that are missing or were covered twice."""

    low: int
    high: int
    how: str


def check_samples(path: Path, section: Section, checkpoints: list[SavedPosition]) -> History | None:
    """Replay a ledger and compare it with the checkpoints; None: there is no ledger that can be
    read."""
    try:
        history = read_history(path, section)
    except FileNotFoundError:
        section.summary = "not recorded"
        return None
    except OSError as error:
        section.problem(FILE, f"cannot be read: {error.strerror}")
        section.summary = "cannot be read"
        return None

    epochs: dict[int, list[EpochPiece]] = defaultdict(list)
    for piece in history.pieces:
        _check_batch(piece, section)
        epochs[piece.epoch].append(piece)

    for epoch in sorted(epochs):
        _check_epoch(epoch, epochs[epoch], section, is_last=epoch == max(epochs))
    for left, right in pairwise([-1, *sorted(epochs)]):
        if right > left + 1:
            section.problem(FILE, f"{span(left + 2, right, 'epoch')} missing")

    _check_positions(history, section, checkpoints)
    num_lost = _count_lost(history, section)
    _summarise_samples(history, section, num_lost)
    return history


def _check_batch(piece: EpochPiece, section: Section) -> None:
    """The ranks' samples must form the global batch of every step: it is enough to check the
    first."""
    batch_parts = sorted((run.low, run.high) for run in piece.runs if run.high > run.low)
    fits = all(left[1] == right[0] for left, right in pairwise(batch_parts))
    size = batch_parts[-1][1] - batch_parts[0][0] if batch_parts else 0
    is_alike = len({(run.epoch, run.stride) for run in piece.runs}) == 1

    if not (is_alike and fits and size == piece.stride):
        had = "; ".join(
            f"rank {rank} had {run.high - run.low:,} from position {run.low:,} of epoch {run.epoch + 1}"
            for rank, run in enumerate(piece.runs[:NAMED_FAULTS])
        )
        what = f"step {piece.first:,}: the ranks' samples are not one global batch: {had}"
        section.problem(line_of(piece.line), what)


# An epoch


def _check_epoch(epoch: int, pieces: list[EpochPiece], section: Section, *, is_last: bool) -> None:
    """Each position exactly once: of a finished epoch all, of the last one those that were
    reached."""
    num_problems = len(section.problems)
    start = pieces[-1].start
    ordered = sorted(pieces, key=lambda piece: (piece.low, piece.high))
    reached = max(piece.high for piece in pieces)
    end = reached if is_last or start.samples is None else start.samples
    _check_order_stayed(epoch, ordered, section)
    _report_faults(epoch, "missing", list(_gaps(ordered, end)), start, section)
    _report_faults(epoch, "covered twice", list(_overlaps(ordered)), start, section)
    if start.samples is not None and reached > start.samples:
        what = f"epoch {epoch + 1} reaches position {reached - 1:,}, but there are {_describe_samples(start)}"
        section.problem(line_of(ordered[-1].line), what)

    if len(section.problems) == num_problems:
        _check_steps(epoch, pieces, section)


def _check_order_stayed(epoch: int, pieces: list[EpochPiece], section: Section) -> None:
    """The order follows from the length of the dataset and the seed."""
    starts = list(dict.fromkeys(piece.start for piece in pieces))
    for before, now in pairwise(starts):
        was, became = (f"{_describe_samples(start)}, seed {start.seed}" for start in (before, now))
        if was != became:
            what = f"the order of epoch {epoch + 1} changed, so samples may be missing or repeated"
            changed = f"{was} before step {now.step + 1:,}, {became} after"
            section.problem(line_of(now.line), f"{what}: {changed}")


def _gaps(pieces: list[EpochPiece], end: int) -> Iterator[CoverageFault]:
    """The positions that no piece covers."""
    reached = 0
    before = "nothing before it"
    for piece in pieces:
        if piece.low > reached:
            yield CoverageFault(
                reached, piece.low, f"{before}, then step {piece.step_at(piece.low):,}"
            )
        if piece.high > reached:
            reached = piece.high
            before = f"step {piece.last:,} ended there"

    if reached < end:
        yield CoverageFault(reached, end, before)


def _overlaps(pieces: list[EpochPiece]) -> Iterator[CoverageFault]:
    """The positions that two pieces cover."""
    reached = pieces[0]
    for piece in pieces[1:]:
        if piece.low < reached.high:
            low = piece.low
            high = min(piece.high, reached.high)
            first = reached.steps_and_ranks(low, high)
            second = piece.steps_and_ranks(low, high)
            yield CoverageFault(low, high, f"in {first}, and in {second}")
        if piece.high > reached.high:
            reached = piece


def _report_faults(
    epoch: int,
    kind: str,
    faults: list[CoverageFault],
    start: LedgerStart,
    section: Section,
) -> None:
    """Name the first faults, and count the others."""
    for fault in faults[:NAMED_FAULTS]:
        named = _named_samples(epoch, fault, start)
        positions = span(fault.low, fault.high - 1, "position")
        section.problem(FILE, f"epoch {epoch + 1}: {positions}{named} {kind}: {fault.how}")

    unnamed = faults[NAMED_FAULTS:]
    if unnamed:
        count = sum(fault.high - fault.low for fault in unnamed)
        last = f"the last at {unnamed[-1].high - 1:,}"
        section.problem(FILE, f"epoch {epoch + 1}: {plural(count, 'more position')} {kind}, {last}")


def _named_samples(epoch: int, fault: CoverageFault, start: LedgerStart) -> str:
    """The samples at some positions, by their index in the dataset; a stream has no index."""
    if start.samples is None or fault.low >= start.samples:
        return ""

    import numpy as np

    from drumline.data.sharding import permute

    high = min(fault.high, start.samples)
    positions = np.arange(fault.low, min(high, fault.low + NAMED_SAMPLES), dtype=np.int64)
    indices = permute(positions, length=start.samples, seed=start.seed, epoch=epoch).tolist()
    names = ", ".join(map(str, indices))
    num_unnamed = high - fault.low - len(indices)
    if num_unnamed:
        names += f" and {num_unnamed:,} more"
    return f" (sample{'s' if len(indices) > 1 else ''} {names})"


def _check_steps(epoch: int, pieces: list[EpochPiece], section: Section) -> None:
    """Each position was covered once; check that each step had its own global batch, in the right
    order."""
    for before, piece in pairwise(pieces):
        if piece.low != before.high:
            began = f"step {piece.first:,} began at position {piece.low:,} of epoch {epoch + 1}"
            what = f"{began}, but step {before.last:,} ended at {before.high:,}"
            section.problem(line_of(piece.line), what)
            return

    for piece in pieces:
        batch_size = piece.start.batch_size
        samples = piece.start.samples
        is_last_step = (
            piece is pieces[-1] and piece.first == piece.last and samples in (None, piece.high)
        )
        if piece.stride != batch_size and not (is_last_step and piece.stride < batch_size):
            what = f"step {piece.first:,} had a global batch of {piece.stride:,}, not of {batch_size:,}"
            section.problem(line_of(piece.line), what)


def _describe_samples(start: LedgerStart) -> str:
    """The length of the dataset, in words."""
    if start.samples is None:
        return "an unknown number of samples"
    return plural(start.samples, "sample")


# All epochs


def _check_positions(
    history: History,
    section: Section,
    saves: list[SavedPosition],
) -> None:
    """Each checkpoint has the position that the ledger has after its step."""
    beyond = [saved.step for saved in saves if saved.step > history.last_step]
    if beyond:
        ends = f"ends at step {history.last_step:,}" if history.starts else "has no start of a job"
        have = "is a checkpoint" if len(beyond) == 1 else f"are {len(beyond)} checkpoints"
        section.problem(FILE, f"{ends}, but there {have} of {span(beyond[0], beyond[-1], 'step')}")

    for saved in saves:
        covering = [piece for piece in history.pieces if piece.first <= saved.step <= piece.last]
        if not covering:
            continue

        epoch, end = max((piece.epoch, piece.end_of(saved.step)) for piece in covering)
        samples = covering[-1].start.samples
        allowed = [(epoch, end), (epoch + 1, 0)]
        if samples is not None:
            allowed = allowed[:1] if end < samples else allowed[1:]
        if (saved.epoch, saved.position) not in allowed:
            epoch, end = allowed[0]
            saved_at = f"is at position {saved.position:,} of epoch {saved.epoch + 1}"
            what = f"the checkpoint of step {saved.step:,} {saved_at}, but the ledger at {end:,} of {epoch + 1}"
            section.problem(FILE, what)


def _count_lost(history: History, section: Section) -> int:
    """The samples that were trained on, or assigned, and are in no weights: a node was lost, and
    others continued."""
    total = 0
    for start in history.starts:
        for lost in start.lost:
            earlier = [piece for piece in history.pieces if piece.start is not start]
            count = sum(_samples_of(lost, piece) for piece in earlier)
            what = f"{plural(count, 'sample')} of {span(lost.first, lost.last, 'step')} were lost with rank {lost.rank}"
            section.note(line_of(start.line), f"{what}, which the others continued without")
            total += count

    return total


def _samples_of(lost: LostSteps, piece: EpochPiece) -> int:
    """How many samples of this piece the lost rank had in its lost steps."""
    if lost.rank >= len(piece.runs):
        return 0

    run = piece.runs[lost.rank]
    lost_steps = min(lost.last, piece.last) - max(lost.first, piece.first) + 1
    return max(0, lost_steps) * (run.high - run.low)


def _summarise_samples(history: History, section: Section, num_lost: int) -> None:
    """The counts and the summary line."""
    for before, now in pairwise(history.starts):
        if before.samples != now.samples:
            sizes = f"{_describe_samples(before)} before step {now.step + 1:,}, {_describe_samples(now)} after"
            section.note(line_of(now.line), f"the dataset changed: {sizes}")

    section.counts = {
        "steps": history.last_step,
        "positions": sum(piece.high - piece.low for piece in history.pieces),
        "starts": len(history.starts),
    }
    if not history.pieces:
        section.summary = "no step is recorded yet"
        return

    last = max(history.pieces, key=lambda piece: (piece.epoch, piece.high))
    is_ended = last.high == last.start.samples
    so_far = "" if is_ended else f", {last.high:,} of epoch {last.epoch + 1} so far"
    length = _describe_samples(last.start)
    if last.start.samples is None:
        length = "a stream of unknown length"
    but = f" but for {plural(num_lost, 'sample')} lost with a node" if num_lost else ""
    once = "" if section.problems else f", each exactly once{but}"
    worlds = list(dict.fromkeys(start.world_size for start in history.starts))
    section.summary = (
        f"{plural(last.epoch + is_ended, 'epoch')} of {length}{so_far}{once}; {plural(history.last_step, 'step')} in "
        f"{plural(len(history.starts), 'start')} on {join_names(worlds)} rank{'' if worlds == [1] else 's'}"
    )
