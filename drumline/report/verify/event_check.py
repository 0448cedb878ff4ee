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
from typing import Any, NamedTuple

from drumline.base.text import plural
from drumline.report.event_sample import rank_files
from drumline.report.verify.section import Section
from drumline.runs.events import Line, read_json_lines

MOST_NAMED = 5
UNREADABLE = "unreadable; an event is lost"


class SeenEvent(NamedTuple):
    """An undamaged event."""

    line: int
    kind: str
    step: int


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
    number = record["number"] if _is_count(record.get("number")) else expected
    begins = number == 0 or not events.num_attempts

    if unread is not None:
        above = f"{events.where}, line {unread.number}"
        if begins:
            section.note(above, "cut off by a kill, at the end of an attempt")
        else:
            section.problem(above, UNREADABLE)

    missing = number - expected - (unread is not None)  # the unreadable line has been reported
    if not begins and number == expected - 1:
        section.problem(where, f"event {number} occurs twice")
    elif not begins and missing > 0:
        what = (
            f"{plural(missing, 'event')} missing above it: its number is {number}, not {expected}"
        )
        section.problem(where, what)
    elif number > 0 and (begins or number < expected):
        what = f"the first {plural(number, 'event')} of an attempt missing above it"
        section.problem(where, what)
        begins = True

    events.num_attempts += begins
    events.next_number = number + 1
    events.num_events += 1
    if (damage := _damage(record)) is not None:
        section.problem(where, f"damaged: {damage}")
        return

    events.events.append(SeenEvent(line, record["kind"], record.get("step", 0)))
    if record["kind"] == "start":
        events.world_size = max(events.world_size, record.get("world_size", 1))


def _damage(record: dict[str, Any]) -> str | None:
    """What is wrong with a record: a value that Drumline does not write."""
    world_size = record.get("world_size", 1)
    if not isinstance(record.get("kind"), str):
        return f"kind is {record.get('kind')!r}"

    for name in ("number", "step"):
        if name in record and not _is_count(record[name]):
            return f"{name} is {record[name]!r}"

    if "number" not in record:
        return "it has no number"
    if record["kind"] == "start" and not (_is_count(world_size) and world_size):
        return f"world_size is {world_size!r}"

    return None


def _is_count(value: Any) -> bool:
    """Whether it is a whole number from 0."""
    return type(value) is int and value >= 0


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
            section.note(
                where, f"is missing: rank {rank} ran on {host}, and may have written it there"
            )
        else:
            section.problem(where, f"is missing: the run had {plural(world_size, 'rank')}")


def _check_resumes(events: RankEvents, section: Section, saved: set[int]) -> None:
    """A run may resume only from a step that was reached, or is in the ledger (killed between a
    save and its event)."""
    reached = 0
    for event in events.events:
        if event.kind == "resume" and event.step > reached and event.step not in saved:
            what = (
                f"resumes at step {event.step:,}, but the events above reach only step {reached:,}"
            )
            section.problem(f"{events.where}, line {event.line}", what)
        reached = max(reached, event.step)
