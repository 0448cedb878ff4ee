"""Checks the events of all ranks: none is missing or damaged, and each start resumes from a step
that was reached.

A process numbers its events from 0, so a file holds one attempt after another, each counting up. A
process that is killed may leave an incomplete line at the end of its attempt; anywhere else an
event was lost.

Event numbers show a gap, but not a lost end. A lost end shows in what all ranks do together: the
mean in a `train` or `evaluation` event is summed over all ranks, so if one rank has reported it,
every other one has reported the previous one. Rank 0 reports each save before the next begins,
which the ledger has recorded. A kill may come just before an event is written: if a lost event and
one that was never written look the same, nothing is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base.text import plural
from drumline.report.event_sample import rank_files
from drumline.report.verify.ledger_history import History
from drumline.report.verify.section import Section
from drumline.runs.events import Line, read_json_lines

MOST_NAMED = 5
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


Ranks = dict[int, RankEvents]
Group = dict[int, Attempt]
"""One attempt of the job, by rank."""


@dataclass(frozen=True)
class EventSummary:
    """What the other checks need from the events."""

    num_events: int
    has_rank_0: bool
    """Whether rank 0's events could be read."""
    saves: list[SeenEvent]
    """All saves and resumes of rank 0. The latest one's checkpoint is kept until a newer one is
    complete."""

    @property
    def has_saved(self) -> bool:
        return any(event.kind == "checkpoint" for event in self.saves)


def check_events(
    folder: Path,
    section: Section,
    *,
    history: History | None,
    hosts: dict[int, str],
    is_at_work: bool,
) -> EventSummary:
    """Read all event files. `history`: the ledger, for comparison; `hosts`: by rank, of the latest
    start."""
    ranks = {rank: read_rank(path, rank, section) for rank, path in rank_files(folder).items()}
    _check_no_file_is_missing(folder.name, ranks, section, hosts)
    readable = {rank: events for rank, events in ranks.items() if events.is_readable}
    if 0 in readable:
        _check_resumes(ranks[0], section, set() if history is None else history.saved_steps)
        _check_attempts(readable, section, is_at_work=is_at_work)
        if history is not None:
            _check_against_ledger(ranks[0], section, history)
    count = sum(events.num_events for events in ranks.values())
    attempts = ranks[0].attempts if 0 in ranks else []
    section.counts = {"ranks": len(ranks), "events": count, "attempts": len(attempts)}
    section.summary = f"{plural(count, 'event')} of {plural(len(ranks), 'rank')} in {plural(len(attempts), 'attempt')}"
    if not section.problems:
        section.summary += ", none missing"
    return EventSummary(
        num_events=count,
        has_rank_0=0 in readable,
        saves=[
            event
            for attempt in attempts
            for event in attempt.events
            if event.kind in ("checkpoint", "resume")
        ],
    )


# One file


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


# All files


def _check_no_file_is_missing(
    folder: str, ranks: Ranks, section: Section, hosts: dict[int, str]
) -> None:
    sizes = [attempt.world_size for rank in ranks.values() for attempt in rank.attempts]
    world_size = max((size for size in sizes if size is not None), default=len(hosts))
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
    for attempt in events.attempts:
        for event in attempt.events:
            if event.kind == "resume" and event.step > reached and event.step not in saved:
                what = f"resumes at step {event.step:,}, but the events above reach only step {reached:,}"
                section.problem(f"{events.where}, line {event.line}", what)
            reached = max(reached, event.step)


# Lost ends of attempts


def _check_against_ledger(events: RankEvents, section: Section, history: History) -> None:
    """Rank 0 reports each save before the next begins."""
    saved = max((event.step for attempt in events.attempts for event in attempt.events), default=0)
    expected = max((step for saves in history.saves for step in saves[:-1]), default=0)
    if expected > saved:
        what = f"the events stop at step {saved:,}, but the ledger has a later save after step {expected:,}"
        section.problem(events.where, what)


def _check_attempts(ranks: Ranks, section: Section, *, is_at_work: bool) -> None:
    """Compare the ranks with each other."""
    groups = [{0: attempt} for attempt in _started(ranks[0])]
    for rank in sorted(ranks.keys() - {0}):
        groups_with_rank = [group for group in groups if (group[0].world_size or 0) > rank]
        attempts = _started(ranks[rank])
        pairs = list(zip(groups_with_rank, attempts, strict=False))
        if len(attempts) == len(groups_with_rank):
            # A kill may come before a rank reports its start: these are then different attempts.
            if all(_agree(group[0], attempt) for group, attempt in pairs):
                for group, attempt in pairs:
                    group[rank] = attempt
            continue
        num_trained = sum(group[0].last_of("train") is not None for group in groups_with_rank)
        if len(attempts) < num_trained and not is_at_work:
            what = f"has {plural(len(attempts), 'attempt')} of it, but rank 0 has {num_trained} that took steps"
            section.problem(ranks[rank].where, what)
    # While a job is running, files that are read later are ahead.
    for group in groups[: len(groups) - is_at_work]:
        for rank, attempt in group.items():
            if lacking := _lacks(rank, group):
                line = attempt.events[-1].line
                section.problem(f"{ranks[rank].where}, line {line}", lacking)


def _started(events: RankEvents) -> list[Attempt]:
    return [attempt for attempt in events.attempts if attempt.world_size is not None]


def _agree(left: Attempt, right: Attempt) -> bool:
    """Whether world size and step agree; an attempt that was killed early, or lost its end, has no
    step."""
    if left.world_size != right.world_size:
        return False
    return left.resumed == right.resumed or None in (left.resumed, right.resumed)


def _lacks(rank: int, group: Group) -> str | None:
    """What this rank must have reported, but has not, as a message."""
    shared = {peer: _shared_events(attempt) for peer, attempt in group.items()}
    last_steps = {
        peer: max((event.step for event in events), default=0) for peer, events in shared.items()
    }
    ahead = max(group, key=lambda peer: (last_steps[peer], len(shared[peer])))
    needed = shared[ahead]
    saved = group[0].last_of("checkpoint")
    # The last event counts only if all ranks took part in a later one.
    is_past = saved is not None and bool(needed) and saved.step >= needed[-1].step
    if not is_past and group[ahead].last_of("end") is None:
        needed = needed[:-1]
    if needed:
        step, kind = needed[-1]
        if needed[-1] not in shared[rank] and step >= last_steps[rank]:
            # The last line may be a checkpoint event, which is written some steps after its own step.
            last = max(event.step for event in group[rank].events)
            return f"the events stop at step {last:,}, but rank {ahead} has the {kind} event of step {step:,}"
    if group[rank].last_of("end", "error") is not None:
        return None
    return _lacks_end(rank, group)


class SharedEvent(NamedTuple):
    """An event that every rank reports of this step."""

    step: int
    kind: str


def _shared_events(attempt: Attempt) -> list[SharedEvent]:
    return [
        SharedEvent(event.step, event.kind)
        for event in attempt.events
        if event.kind in ("train", "evaluation")
    ]


def _lacks_end(rank: int, group: Group) -> str | None:
    """Rank 0 ends last, because it saves; if it is killed in that save, only the others have
    reported their end."""
    for peer, attempt in group.items():
        end = attempt.last_of("end")
        if end is None:
            continue
        is_saved = rank == 0 and end.step in group[0].steps_of("checkpoint")
        if peer == 0 or is_saved:
            return f"the end is missing, which rank {peer} reported"
    return None
