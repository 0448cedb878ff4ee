"""Reads the ledger: the starts of the job, the ranges of steps, and which of these are valid.

After a kill a run resumes from its last checkpoint. Later steps that are recorded before that start
are void: they are repeated, and recorded again after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base import typed_json
from drumline.base.text import span
from drumline.report.verify.section import Section
from drumline.runs.events import read_json_lines
from drumline.runs.ledger_entries import LedgerEntry, from_json, num_steps

FILE = "ledger.jsonl"


class LostSteps(NamedTuple):
    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class LedgerStart:
    line: int
    step: int
    epoch: int
    position: int
    world_size: int
    batch_size: int
    samples: int | None
    """None: a stream of unknown length."""
    seed: int
    lost: tuple[LostSteps, ...] = field(default=(), kw_only=True)
    """What was lost with nodes that the others continued without."""


@dataclass(frozen=True)
class StepRange:
    """The samples of all ranks from one step to another."""

    line: int
    first: int
    last: int
    ranks: tuple[tuple[LedgerEntry, ...], ...]
    start: LedgerStart

    def cut(self, last: int) -> StepRange:
        """The same up to an earlier step."""
        ranks = []
        for runs in self.ranks:
            left = last - self.first + 1
            entries = []
            for run in runs:
                if left > 0:
                    entries.append(run.slice(0, min(run.steps, left)))
                left -= run.steps
            ranks.append(tuple(entries))
        return replace(self, last=last, ranks=tuple(ranks))


@dataclass
class History:
    """The starts of a run, and the valid ranges of steps, in the order of their steps."""

    starts: list[LedgerStart]
    ranges: list[StepRange]
    saved_steps: set[int] = field(default_factory=set)
    """Steps of which there may be a checkpoint, also those of void ranges."""

    @property
    def last_step(self) -> int:
        last_recorded = self.ranges[-1].last if self.ranges else 0
        last_start = self.starts[-1].step if self.starts else 0
        return max(0, last_recorded, last_start)


def read_history(path: Path, section: Section) -> History:
    """Replay a ledger; damaged lines and steps that are missing or recorded twice become
    problems."""
    history = History([], [])
    for line in read_json_lines(path):
        where = f"{FILE}, line {line.number}"
        if line.record is None:
            section.note(where, "incomplete: cut off by a kill or a full disk")
            continue
        try:
            entry = _entry(line.number, line.record, history)
        except ValueError as error:
            section.problem(where, str(error))
            continue
        if isinstance(entry, LedgerStart):
            _add_start(history, entry, section, where)
        else:
            _add_range(history, entry, section, where, is_saved=not line.record.get("unsaved"))
    return history


def _entry(line: int, record: dict[str, Any], history: History) -> LedgerStart | StepRange:
    kind = record.get("kind")
    if kind == "start":
        counts = _numbers(record, "step", "epoch", "position", "world_size", "batch_size")
        samples = [None] if record.get("samples") is None else _numbers(record, "samples")
        return LedgerStart(
            line, *counts, *samples, *_numbers(record, "seed", least=None), lost=_lost(record)
        )
    if kind != "steps":
        raise ValueError(f"its kind is {kind!r}, which this version of Drumline does not know")
    if not history.starts:
        raise ValueError("steps, but no start of a job above them")
    first, last = _numbers(record, "first", "last")
    ranks = record.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise ValueError("damaged: it names no ranks")
    try:
        entries = tuple(tuple(from_json(entry)) for entry in ranks)
    except ValueError as error:
        raise ValueError(f"damaged: {error}") from None
    for rank, runs in enumerate(entries):
        if num_steps(runs) != last - first + 1:
            raise ValueError(
                f"damaged: {span(first, last, 'step')}, but rank {rank} has {num_steps(runs)}"
            )
    return StepRange(line, first, last, entries, history.starts[-1])


def _lost(record: dict[str, Any]) -> tuple[LostSteps, ...]:
    lost = record.get("lost", [])
    try:
        entries = typed_json.from_json(list[tuple[int, int, int]], lost)
    except ValueError:
        raise ValueError(f"damaged: lost is {lost!r}") from None
    return tuple(LostSteps(*entry) for entry in entries)


def _numbers(record: dict[str, Any], *names: str, least: int | None = 0) -> list[int]:
    for name in names:
        value = record.get(name)
        if type(value) is not int or (least is not None and value < least):
            raise ValueError(f"damaged: {name} is {value!r}")
    return [record[name] for name in names]


def _add_start(history: History, start: LedgerStart, section: Section, where: str) -> None:
    if start.step > history.last_step:
        lost = span(history.last_step + 1, start.step, "step")
        section.problem(where, f"the run resumed from step {start.step:,}; not recorded: {lost}")
    history.starts.append(start)
    history.saved_steps.add(start.step)
    history.ranges = [
        steps if steps.last <= start.step else steps.cut(start.step)
        for steps in history.ranges
        if steps.first <= start.step
    ]


def _add_range(
    history: History, steps: StepRange, section: Section, where: str, *, is_saved: bool
) -> None:
    expected = history.last_step + 1
    if len(steps.ranks) != steps.start.world_size:
        section.problem(
            where, f"{len(steps.ranks)} ranks, but the job had {steps.start.world_size}"
        )
    if steps.first > expected:
        section.problem(where, f"not recorded above it: {span(expected, steps.first - 1, 'step')}")
    elif steps.first < expected:
        section.problem(
            where, f"recorded twice: {span(steps.first, min(expected - 1, steps.last), 'step')}"
        )
    history.ranges.append(steps)
    if is_saved:
        history.saved_steps.add(steps.last)
