"""The events of every rank: none missing, none unreadable, and each start of the job continues what came before.

A process numbers its events from 0, so a file is a row of attempts that each count up. A process that is killed may
leave a torn line at the end of its attempt; anywhere else an event was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.metrics.json_lines import Line, read_lines
from drumline.verify.findings import Part, plural

OLD = "has events without numbers, of an older version: lost ones would not be noticed"


@dataclass
class Attempt:
    """What one process reported."""

    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """By line."""

    @property
    def next_number(self) -> int | None:
        """None: it does not number its events."""
        number = self.events[-1][1].get("number") if self.events else None
        return number + 1 if type(number) is int else None

    def last_of(self, kind: str) -> dict[str, Any] | None:
        return next((event for _, event in reversed(self.events) if event.get("kind") == kind), None)


@dataclass
class RankEvents:
    """One file of events."""

    rank: int
    where: str
    attempts: list[Attempt] = field(default_factory=list)
    num_events: int = 0
    num_unnumbered: int = 0


def check_events(folder: Path, part: Part, *, recorded: set[int], hosts: dict[int, str]) -> bool:
    """Read all event files. `recorded`: steps that the ledger vouches for; `hosts`: where the ranks last ran.
    Returns whether the events are numbered, as they have been since there is a ledger."""
    found = {}
    for path in sorted(folder.glob("rank-[0-9]*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        found[rank] = RankEvents(rank, f"{folder.name}/{path.name}")
        try:
            _read(path, found[rank], part)
        except OSError as error:
            part.problem(found[rank].where, f"cannot be read: {error.strerror}")
    _check_ranks_are_there(folder.name, found, part, hosts)
    if 0 in found:
        _check_resumes(found[0], part, recorded)
        _check_ends(found, part)
    count = sum(events.num_events for events in found.values())
    attempts = len(found[0].attempts) if 0 in found else 0
    part.counts = {"ranks": len(found), "events": count, "attempts": attempts}
    missing = "" if part.problems else ", none missing"
    part.summary = (
        f"{plural(count, 'event')} of {plural(len(found), 'rank')} in {plural(attempts, 'attempt')}{missing}"
    )
    return any(events.num_events > events.num_unnumbered for events in found.values())


def _read(path: Path, events: RankEvents, part: Part) -> None:
    torn: Line | None = None
    for line in read_lines(path):
        if line.record is None:
            if torn is not None:
                part.problem(f"{events.where}, line {torn.number}", "unreadable; an event is lost")
            torn = line
            continue
        _take(events, line, torn, part)
        torn = None
    if torn is not None:
        what = "torn by a kill, or being written" if not torn.is_ended else "unreadable; an event is lost"
        (part.problem if torn.is_ended else part.note)(f"{events.where}, line {torn.number}", what)
    if events.num_unnumbered:
        part.note(events.where, OLD)


def _take(events: RankEvents, line: Line, torn: Line | None, part: Part) -> None:
    record = line.record or {}
    events.num_events += 1
    number = record.get("number")
    number = number if type(number) is int else None
    if number is None:
        events.num_unnumbered += 1
    current = events.attempts[-1] if events.attempts else None
    expected = current.next_number if current is not None else None
    begins = number == 0 or current is None or (number is None and record.get("kind") == "start")
    if torn is not None:
        _tell_torn(f"{events.where}, line {torn.number}", part, is_end_of_attempt=begins)
    if begins and number not in (None, 0):
        part.problem(
            f"{events.where}, line {line.number}", f"the first {plural(number, 'event')} are missing above it"
        )
    elif not begins and number != expected and number is not None and expected is not None:
        _tell_gap(f"{events.where}, line {line.number}", part, number, expected, was_torn=torn is not None)
        begins = number < expected - 1
    if begins or current is None:
        events.attempts.append(Attempt())
    events.attempts[-1].events.append((line.number, record))


def _tell_torn(where: str, part: Part, *, is_end_of_attempt: bool) -> None:
    if is_end_of_attempt:
        part.note(where, "torn by a kill, at the end of an attempt")
    else:
        part.problem(where, "unreadable; an event is lost")


def _tell_gap(where: str, part: Part, number: int, expected: int, *, was_torn: bool) -> None:
    missing = number - expected - was_torn  # the torn line was one of them, and has been told
    if missing > 0:
        part.problem(
            where, f"{plural(missing, 'event')} missing above it: its number is {number}, not {expected}"
        )
    elif number == expected - 1:
        part.problem(where, f"the event {number} is there twice")
    elif number < expected:
        part.problem(where, f"the first {plural(number, 'event')} of an attempt are missing above it")


def _check_ranks_are_there(
    folder: str, found: dict[int, RankEvents], part: Part, hosts: dict[int, str]
) -> None:
    starts = [
        event for rank in found.values() for attempt in rank.attempts if (event := attempt.last_of("start"))
    ]
    world_size = max((int(start.get("world_size", 1)) for start in starts), default=len(hosts))
    shared = {hosts.get(rank) for rank in found}
    for rank in range(world_size):
        if rank in found:
            continue
        where, host = f"{folder}/rank-{rank:05d}.jsonl", hosts.get(rank)
        if host is not None and host not in shared and 0 in found:
            part.note(
                where, f"is not here; rank {rank} ran on {host}, which may keep it in a folder of its own"
            )
        else:
            part.problem(where, f"is missing: the run had {plural(world_size, 'rank')}")


def _check_resumes(events: RankEvents, part: Part, recorded: set[int]) -> None:
    """A run can go on only from a step that was reached. (Killed between a save and its event, the ledger knows it.)"""
    reached = 0
    for attempt in events.attempts:
        for line, event in attempt.events:
            step = event.get("step", 0)
            if event.get("kind") == "resume" and step > reached and step not in recorded:
                part.problem(
                    f"{events.where}, line {line}",
                    f"resumes at step {step:,}, but nothing above goes beyond {reached:,}",
                )
            reached = max(reached, step)


def _check_ends(found: dict[int, RankEvents], part: Part) -> None:
    """Where one rank of the latest attempt reached the end, all did."""
    latest = {rank: events.attempts[-1] for rank, events in found.items() if events.attempts}
    start = latest[0].last_of("start") if 0 in latest else None
    if start is None:
        return
    ranks = [rank for rank in range(int(start.get("world_size", 1))) if rank in latest]
    ends = {rank: (latest[rank].last_of("end") or {}).get("step") for rank in ranks}
    reached = max((step for step in ends.values() if step is not None), default=None)
    for rank in ranks:
        if ends[rank] != reached:
            other = next(rank for rank in ranks if ends[rank] == reached)
            line, event = latest[rank].events[-1]
            part.problem(f"{found[rank].where}, line {line}", f"the events stop at step {event.get('step', 0):,}, "
                         f"but rank {other} reported the end, step {reached:,}")  # fmt: skip
