"""A rank's file of events, read: what each attempt of the job reported, and what is lost or damaged in the file.

A process numbers its events from 0, so a file is a row of attempts that each count up. A process that is killed may
leave an incomplete line at the end of its attempt; anywhere else an event was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drumline.audit.section import Section
from drumline.metrics.json_lines import Line, read_lines
from drumline.text import plural

OLD = "has events without numbers, of an older version: lost ones would not be noticed"


class SeenEvent(NamedTuple):
    """One event whose stamp is as it should be."""

    line: int
    kind: str
    step: int
    fields: dict[str, Any]


@dataclass
class Attempt:
    """What one process reported."""

    events: list[SeenEvent] = field(default_factory=list)
    next_number: int | None = None
    """None: it does not number its events."""

    def last_of(self, *kinds: str) -> SeenEvent | None:
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def steps_of(self, kind: str) -> list[int]:
        return [event.step for event in self.events if event.kind == kind]

    @property
    def world_size(self) -> int | None:
        """None: it did not come as far as its start."""
        start = self.last_of("start")
        return None if start is None else start.fields.get("world_size", 1)

    @property
    def resumed(self) -> int | None:
        """The step that it went on from; None where it began, or did not come as far."""
        resume = self.last_of("resume")
        return None if resume is None else resume.step

    @property
    def total_steps(self) -> int | None:
        start = self.last_of("start")
        total = None if start is None else start.fields.get("total_steps")
        return total if type(total) is int else None


@dataclass
class RankEvents:
    """One file of events."""

    rank: int
    where: str
    attempts: list[Attempt] = field(default_factory=list)
    num_events: int = 0
    num_unnumbered: int = 0
    is_readable: bool = True


def read_rank(path: Path, rank: int, part: Section) -> RankEvents:
    """Read one file; what is wrong with its lines becomes a problem."""
    events = RankEvents(rank, f"{path.parent.name}/{path.name}")
    try:
        _read(path, events, part)
    except OSError as error:
        events.is_readable = False
        part.problem(events.where, f"cannot be read: {error.strerror}")
    if events.num_unnumbered:
        part.note(events.where, OLD)
    return events


def _read(path: Path, events: RankEvents, part: Section) -> None:
    cut: Line | None = None
    for line in read_lines(path):
        if line.record is None:
            if cut is not None:
                part.problem(f"{events.where}, line {cut.number}", "unreadable; an event is lost")
            cut = line
            continue
        _take(events, line, cut, part)
        cut = None
    if cut is not None:
        what = "cut off by a kill, or being written" if not cut.is_ended else "unreadable; an event is lost"
        (part.problem if cut.is_ended else part.note)(f"{events.where}, line {cut.number}", what)


def _take(events: RankEvents, line: Line, cut: Line | None, part: Section) -> None:
    record, where = line.record or {}, f"{events.where}, line {line.number}"
    current = events.attempts[-1] if events.attempts else None
    expected = None if current is None else current.next_number
    damage = _damage(record, in_numbered=expected is not None)
    if damage is not None:
        part.problem(where, f"damaged: {damage}")
    number = record.get("number")
    if not _is_count(number):
        number = expected if damage is not None else None
    begins = number == 0 or current is None or (number is None and record.get("kind") == "start")
    if cut is not None:
        _report_cut(f"{events.where}, line {cut.number}", part, is_end_of_attempt=begins)
    if begins and number not in (None, 0):
        part.problem(where, f"the first {plural(number, 'event')} are missing above it")
    elif not begins and number != expected and number is not None and expected is not None:
        _tell_gap(where, part, number, expected, was_cut=cut is not None)
        begins = number < expected - 1
    if begins or current is None:
        current = Attempt()
        events.attempts.append(current)
    current.next_number = None if number is None else number + 1
    events.num_events += 1
    events.num_unnumbered += number is None
    if damage is None:
        current.events.append(SeenEvent(line.number, str(record.get("kind")), record.get("step", 0), record))


def _damage(record: dict[str, Any], *, in_numbered: bool) -> str | None:
    """What no version of Drumline would have written."""
    kind = record.get("kind")
    if not isinstance(kind, str):
        return f"kind is {kind!r}"
    for name in ("number", "step"):
        if name in record and not _is_count(record[name]):
            return f"{name} is {record[name]!r}"
    if in_numbered and "number" not in record and kind != "start":
        return "it has no number"
    world_size = record.get("world_size", 1)
    if kind == "start" and not (_is_count(world_size) and world_size > 0):
        return f"world_size is {world_size!r}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _report_cut(where: str, part: Section, *, is_end_of_attempt: bool) -> None:
    if is_end_of_attempt:
        part.note(where, "cut off by a kill, at the end of an attempt")
    else:
        part.problem(where, "unreadable; an event is lost")


def _tell_gap(where: str, part: Section, number: int, expected: int, *, was_cut: bool) -> None:
    missing = number - expected - was_cut  # the cut line was one of them, and has been reported
    if missing > 0:
        part.problem(
            where, f"{plural(missing, 'event')} missing above it: its number is {number}, not {expected}"
        )
    elif number == expected - 1:
        part.problem(where, f"the event {number} is there twice")
    elif number < expected:
        part.problem(where, f"the first {plural(number, 'event')} of an attempt are missing above it")
