"""Checks the events of all ranks: none is missing or damaged, and each start resumes from a step
that was reached.

A process numbers its events from 0, so a file holds one attempt after another, each counting up. A
process that is killed may leave an incomplete line at the end of its attempt; anywhere else an
event was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from drumline.base.text import plural
from drumline.base.untrusted import from_json
from drumline.report.event_sample import rank_files
from drumline.report.verify.section import Section
from drumline.runs.events import Line, read_json_lines

MOST_NAMED = 5
Count = Annotated[int, msgspec.Meta(ge=0)]
UNREADABLE = "unreadable; an event is lost"


@dataclass(frozen=True, kw_only=True)
class SeenEvent:
    """An undamaged event."""

    line: int
    number: Count
    kind: str
    step: Count = 0
    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Of a start of the job."""


@dataclass
class RankEvents:
    """The events of one rank."""

    where: str
    events: list[SeenEvent] = field(default_factory=list)
    num_events: int = 0
    num_attempts: int = 0
    next_number: int = 0
    world_size: int = 0
    """The largest of its attempts; 0: it has reported no start."""

    def of_kinds(self, *kinds: str) -> list[SeenEvent]:
        """The events of these kinds."""
        return [event for event in self.events if event.kind in kinds]


def check_events(
    folder: Path,
    section: Section,
    *,
    saved_steps: set[int],
    hosts: dict[int, str],
) -> RankEvents:
    """Read all event files; returns what rank 0 has reported. `saved_steps`: those of the ledger;
    `hosts`: by rank, of the latest start."""
    ranks = {rank: read_rank(path, section) for rank, path in rank_files(folder).items()}
    first_rank = ranks.get(0, RankEvents(folder.name))
    _check_no_file_is_missing(folder.name, ranks, section, hosts)
    _check_resumes(first_rank, section, saved_steps)
    count = sum(events.num_events for events in ranks.values())
    attempts = first_rank.num_attempts
    section.counts = {"ranks": len(ranks), "events": count, "attempts": attempts}
    section.summary = (
        f"{plural(count, 'event')} of {plural(len(ranks), 'rank')} in {plural(attempts, 'attempt')}"
    )
    if not section.problems:
        section.summary += ", none missing"
    return first_rank


def read_rank(path: Path, section: Section) -> RankEvents:
    """Read one file; damaged and missing lines become problems."""
    events = RankEvents(f"{path.parent.name}/{path.name}")
    unread: Line | None = None
    try:
        for line in read_json_lines(path):
            if line.record is not None:
                _add(events, line.number, line.record, unread, section)
            elif unread is not None:
                section.problem(f"{events.where}, line {unread.number}", UNREADABLE)
            unread = line if line.record is None else None
    except OSError as error:
        section.problem(events.where, f"cannot be read: {error.strerror}")

    if unread is not None and unread.is_ended:
        section.problem(f"{events.where}, line {unread.number}", UNREADABLE)
    elif unread is not None:
        section.note(f"{events.where}, line {unread.number}", "cut off by a kill, or being written")

    return events


def _add(
    events: RankEvents,
    line: int,
    record: dict[str, Any],
    unread: Line | None,
    section: Section,
) -> None:
    """Add an event to its attempt. `unread`: the line above, if it is incomplete."""
    where = f"{events.where}, line {line}"
    expected = events.next_number
    number = record.get("number")
    if type(number) is not int or number < 0:
        number = expected
    begins = number == 0 or not events.num_attempts

    if unread is not None:
        above = f"{events.where}, line {unread.number}"
        if begins:
            section.note(above, "cut off by a kill, at the end of an attempt")
        else:
            section.problem(above, UNREADABLE)

    # the unreadable line has been reported
    missing = number - expected - (unread is not None)
    if not begins and number == expected - 1:
        section.problem(where, f"event {number} occurs twice")
    elif not begins and missing > 0:
        numbers = f"its number is {number}, not {expected}"
        section.problem(where, f"{plural(missing, 'event')} missing above it: {numbers}")
    elif number > 0 and (begins or number < expected):
        what = f"the first {plural(number, 'event')} of an attempt missing above it"
        section.problem(where, what)
        begins = True

    events.num_attempts += begins
    events.next_number = number + 1
    events.num_events += 1
    try:
        event = from_json(SeenEvent, {**record, "line": line})
    except ValueError as error:
        section.problem(where, f"damaged: {error}")
        return

    events.events.append(event)
    if event.kind == "start":
        events.world_size = max(events.world_size, event.world_size)


def _check_no_file_is_missing(
    folder: str,
    ranks: dict[int, RankEvents],
    section: Section,
    hosts: dict[int, str],
) -> None:
    """Each rank of the largest attempt has a file, here or on its host."""
    world_size = max((events.world_size for events in ranks.values()), default=0) or len(hosts)
    shared = {hosts.get(rank) for rank in ranks}
    absent = (rank for rank in range(world_size) if rank not in ranks)

    for rank in islice(absent, MOST_NAMED):
        where = f"{folder}/rank-{rank:05d}.jsonl"
        host = hosts.get(rank)
        if host is not None and host not in shared and 0 in ranks:
            what = f"is missing: rank {rank} ran on {host}, and may have written it there"
            section.note(where, what)
        else:
            section.problem(where, f"is missing: the run had {plural(world_size, 'rank')}")


def _check_resumes(events: RankEvents, section: Section, saved: set[int]) -> None:
    """A run may resume only from a step that was reached, or is in the ledger (killed between a
    save and its event)."""
    reached = 0
    for event in events.events:
        if event.kind == "resume" and event.step > reached and event.step not in saved:
            furthest = f"the events above reach only step {reached:,}"
            what = f"resumes at step {event.step:,}, but {furthest}"
            section.problem(f"{events.where}, line {event.line}", what)
        reached = max(reached, event.step)
