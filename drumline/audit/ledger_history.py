"""The ledger's file, read: starts of the job and stretches of steps, and which of these count.

After a kill a run goes back to its last checkpoint. What stood above that start and came later is void: those steps
are taken again, and recorded again below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.audit.section import Section
from drumline.data.ledger import LedgerEntry, from_json, num_steps
from drumline.metrics.json_lines import Line, read_lines
from drumline.text import span

FILE = "ledger.jsonl"


@dataclass(frozen=True)
class LedgerStart:
    """The job started here."""

    line: int
    step: int
    epoch: int
    position: int
    world_size: int
    batch_size: int
    samples: int | None
    """None: a stream whose length is not known."""
    seed: int


@dataclass(frozen=True)
class StepRange:
    """What all ranks did from one step to another."""

    line: int
    first: int
    last: int
    ranks: tuple[tuple[LedgerEntry, ...], ...]
    start: LedgerStart

    def cut(self, last: int) -> StepRange:
        """The same up to an earlier step."""
        kept = tuple(tuple(_first_steps(runs, last - self.first + 1)) for runs in self.ranks)
        return replace(self, last=last, ranks=kept)


@dataclass
class History:
    """The starts of a run, and the stretches that count, in the order of their steps."""

    starts: list[LedgerStart]
    stretches: list[StepRange]
    saves: list[list[int]] = field(default_factory=list)
    """For each start the steps at which it was about to save, void or not."""

    @property
    def saved_steps(self) -> set[int]:
        """Steps that a checkpoint may have been taken at."""
        return {step for saves in self.saves for step in saves} | {start.step for start in self.starts}

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        return max(
            self.stretches[-1].last if self.stretches else 0, self.starts[-1].step if self.starts else 0
        )


def read_history(path: Path, part: Section) -> History:
    """Replay the starts and the stretches of a ledger; what is wrong with its lines becomes a problem."""
    history = History([], [])
    for line in read_lines(path):
        try:
            entry = _entry(line, history)
        except ValueError as error:
            part.problem(f"{FILE}, line {line.number}", str(error))
            continue
        if isinstance(entry, LedgerStart):
            _take_start(history, entry, part)
        elif isinstance(entry, StepRange):
            _take_stretch(history, entry, part)
        else:
            part.note(f"{FILE}, line {line.number}", "incomplete: cut off by a kill or a full disk")
    return history


def _entry(line: Line, history: History) -> LedgerStart | StepRange | None:
    record = line.record
    if record is None:
        return None
    kind = record.get("kind")
    if kind == "start":
        counts = _numbers(record, "step", "epoch", "position", "world_size", "batch_size")
        return LedgerStart(line.number, *counts, *_samples(record), *_numbers(record, "seed", least=None))
    if kind != "steps":
        raise ValueError(f"a line of the kind {kind!r}, which this version of Drumline does not know")
    if not history.starts:
        raise ValueError("steps, but no start of a job above them")
    first, last = _numbers(record, "first", "last")
    ranks = record.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise ValueError("damaged: it names no ranks")
    stretch = StepRange(line.number, first, last, tuple(map(_runs, ranks)), history.starts[-1])
    for rank, runs in enumerate(stretch.ranks):
        if num_steps(runs) != last - first + 1:
            raise ValueError(f"damaged: {span(first, last, 'step')}, but rank {rank} has {num_steps(runs)}")
    return stretch


def _numbers(record: dict[str, Any], *names: str, least: int | None = 0) -> list[int]:
    for name in names:
        value = record.get(name)
        if type(value) is not int or (least is not None and value < least):
            raise ValueError(f"damaged: {name} is {value!r}")
    return [record[name] for name in names]


def _samples(record: dict[str, Any]) -> list[int | None]:
    return [None] if record.get("samples") is None else [*_numbers(record, "samples")]


def _runs(value: Any) -> tuple[LedgerEntry, ...]:
    try:
        return tuple(from_json(value))
    except ValueError as error:
        raise ValueError(f"damaged: {error}") from None


def _take_start(history: History, start: LedgerStart, part: Section) -> None:
    known = history.last_step
    if not history.starts and start.step > 0:
        part.note(
            f"{FILE}, line {start.line}", f"begins after step {start.step}; what came before is not recorded"
        )
    elif start.step > known:
        lost = span(known + 1, start.step, "step")
        part.problem(
            f"{FILE}, line {start.line}", f"the run went on from step {start.step:,}; not recorded: {lost}"
        )
    history.starts.append(start)
    history.saves.append([])
    history.stretches = [
        stretch if stretch.last <= start.step else stretch.cut(start.step)
        for stretch in history.stretches
        if stretch.first <= start.step
    ]


def _take_stretch(history: History, stretch: StepRange, part: Section) -> None:
    where, expected = f"{FILE}, line {stretch.line}", history.last_step + 1
    if len(stretch.ranks) != stretch.start.world_size:
        part.problem(where, f"{len(stretch.ranks)} ranks, but the job had {stretch.start.world_size}")
    if stretch.first > expected:
        part.problem(where, f"not recorded above it: {span(expected, stretch.first - 1, 'step')}")
    elif stretch.first < expected:
        part.problem(where, f"recorded twice: {span(stretch.first, min(expected - 1, stretch.last), 'step')}")
    history.stretches.append(stretch)
    history.saves[-1].append(stretch.last)


def _first_steps(runs: tuple[LedgerEntry, ...], count: int) -> Iterator[LedgerEntry]:
    for run in runs:
        if count > 0:
            yield run.slice(0, min(run.steps, count))
        count -= run.steps
