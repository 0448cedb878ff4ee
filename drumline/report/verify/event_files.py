"""Reads a rank's event file: the events of each attempt of the job, and what is lost or damaged in
the file.

A process numbers its events from 0, so a file holds one attempt after another, each counting up. A
process that is killed may leave an incomplete line at the end of its attempt; anywhere else an
event was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base.text import plural
from drumline.report.verify.section import Section
from drumline.runs.events import Line, read_json_lines

UNREADABLE = "unreadable; an event is lost"


class SeenEvent(NamedTuple):
    """An undamaged event."""

    line: int
    kind: str
    step: int
    fields: dict[str, Any]


@dataclass
class Attempt:
    """The events of one process."""

    events: list[SeenEvent] = field(default_factory=list)
    next_number: int = 0

    def last_of(self, *kinds: str) -> SeenEvent | None:
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def steps_of(self, kind: str) -> list[int]:
        return [event.step for event in self.events if event.kind == kind]

    @property
    def world_size(self) -> int | None:
        """None: it ended before its start was reported."""
        start = self.last_of("start")
        return None if start is None else start.fields.get("world_size", 1)

    @property
    def resumed(self) -> int | None:
        """The step that it resumed from; None: it did not resume, or ended before that."""
        resume = self.last_of("resume", "regrouped")
        return None if resume is None else resume.step


@dataclass
class RankEvents:
    rank: int
    where: str
    attempts: list[Attempt] = field(default_factory=list)
    num_events: int = 0
    is_readable: bool = True


def read_rank(path: Path, rank: int, section: Section) -> RankEvents:
    """Read one file; damaged and missing lines become problems."""
    events = RankEvents(rank, f"{path.parent.name}/{path.name}")
    unread: Line | None = None
    try:
        for line in read_json_lines(path):
            if line.record is not None:
                _add(events, line, unread, section)
            elif unread is not None:
                section.problem(f"{events.where}, line {unread.number}", UNREADABLE)
            unread = line if line.record is None else None
    except OSError as error:
        events.is_readable = False
        section.problem(events.where, f"cannot be read: {error.strerror}")
    if unread is not None and unread.is_ended:
        section.problem(f"{events.where}, line {unread.number}", UNREADABLE)
    elif unread is not None:
        section.note(f"{events.where}, line {unread.number}", "cut off by a kill, or being written")
    return events


def _add(events: RankEvents, line: Line, unread: Line | None, section: Section) -> None:
    """Add an event to its attempt. `unread`: the line above, if it is incomplete."""
    record = line.record or {}
    where = f"{events.where}, line {line.number}"
    expected = events.attempts[-1].next_number if events.attempts else 0
    number = record["number"] if _is_count(record.get("number")) else expected
    if (damage := _damage(record)) is not None:
        section.problem(where, f"damaged: {damage}")
    begins = number == 0 or not events.attempts
    if unread is not None and begins:
        section.note(
            f"{events.where}, line {unread.number}", "cut off by a kill, at the end of an attempt"
        )
    elif unread is not None:
        section.problem(f"{events.where}, line {unread.number}", UNREADABLE)
    missing = number - expected - (unread is not None)  # the unreadable line has been reported
    if not begins and number == expected - 1:
        section.problem(where, f"event {number} occurs twice")
    elif not begins and missing > 0:
        what = (
            f"{plural(missing, 'event')} missing above it: its number is {number}, not {expected}"
        )
        section.problem(where, what)
    elif number > 0 and (begins or number < expected):
        section.problem(
            where, f"the first {plural(number, 'event')} of an attempt missing above it"
        )
        begins = True
    if begins:
        events.attempts.append(Attempt())
    events.attempts[-1].next_number = number + 1
    events.num_events += 1
    if damage is None:
        event = SeenEvent(line.number, record["kind"], record.get("step", 0), record)
        events.attempts[-1].events.append(event)


def _damage(record: dict[str, Any]) -> str | None:
    """What is wrong with a record: a value that Drumline does not write."""
    kind = record.get("kind")
    world_size = record.get("world_size", 1)
    if not isinstance(kind, str):
        return f"kind is {kind!r}"
    for name in ("number", "step"):
        if name in record and not _is_count(record[name]):
            return f"{name} is {record[name]!r}"
    if "number" not in record:
        return "it has no number"
    if kind == "start" and not (_is_count(world_size) and world_size > 0):
        return f"world_size is {world_size!r}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
