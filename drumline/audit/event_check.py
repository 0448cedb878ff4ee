"""Checks the events of all ranks: none is missing or damaged, and each start resumes from a step that was reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from drumline.audit.event_attempts import check_attempts
from drumline.audit.event_files import RankEvents, SeenEvent, read_rank
from drumline.audit.ledger_history import History
from drumline.audit.section import Section
from drumline.text import plural

NAME = re.compile(r"rank-(\d{5}|[1-9]\d{5,})\.jsonl")
MOST_NAMED = 5


@dataclass(frozen=True)
class EventSummary:
    """What the other checks need to know of the events."""

    is_numbered: bool
    """False: written by a version that had no ledger either."""
    has_started: bool
    """Whether any rank reported its start, which is after environment.json is written."""
    newest: SeenEvent | None
    """The latest save or resume of rank 0: its checkpoint is kept until a newer one is complete."""
    known: frozenset[int]
    """The steps of all saves and resumes of rank 0."""
    has_saved: bool
    has_rank_0: bool
    """Whether rank 0's events could be read."""


def check_events(
    folder: Path, section: Section, *, history: History | None, hosts: dict[int, str], is_at_work: bool
) -> EventSummary:
    """Read all event files. `history`: the ledger, to compare with; `hosts`: of the ranks of the latest start."""
    found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        if (named := NAME.fullmatch(path.name)) is None:
            section.note(f"{folder.name}/{path.name}", "is not named like a rank's file, and was not read")
        else:
            found[int(named[1])] = read_rank(path, int(named[1]), section)
    _check_no_file_is_missing(folder.name, found, section, hosts)
    readable = {rank: events for rank, events in found.items() if events.is_readable}
    if 0 in readable:
        _check_resumes(found[0], section, set() if history is None else history.saved_steps)
        check_attempts(readable, section, history, is_at_work=is_at_work)
    count = sum(events.num_events for events in found.values())
    attempts = len(found[0].attempts) if 0 in found else 0
    section.counts = {"ranks": len(found), "events": count, "attempts": attempts}
    missing = "" if section.problems else ", none missing"
    section.summary = (
        f"{plural(count, 'event')} of {plural(len(found), 'rank')} in {plural(attempts, 'attempt')}{missing}"
    )
    saves = [
        event
        for attempt in (found[0].attempts if 0 in found else [])
        for event in attempt.events
        if event.kind in ("checkpoint", "resume")
    ]
    return EventSummary(
        is_numbered=any(events.num_events > events.num_unnumbered for events in found.values()),
        has_started=any(attempt.world_size for rank in found.values() for attempt in rank.attempts),
        newest=saves[-1] if saves else None,
        known=frozenset(event.step for event in saves),
        has_saved=any(event.kind == "checkpoint" for event in saves),
        has_rank_0=0 in readable,
    )


def _check_no_file_is_missing(
    folder: str, found: dict[int, RankEvents], section: Section, hosts: dict[int, str]
) -> None:
    sizes = [attempt.world_size for rank in found.values() for attempt in rank.attempts]
    world_size = max((size for size in sizes if size is not None), default=len(hosts))
    shared = {hosts.get(rank) for rank in found}
    absent = (rank for rank in range(world_size) if rank not in found)
    for rank in islice(absent, MOST_NAMED):
        where, host = f"{folder}/rank-{rank:05d}.jsonl", hosts.get(rank)
        if host is not None and host not in shared and 0 in found:
            section.note(where, f"is missing: rank {rank} ran on {host}, and may have written it there")
        else:
            section.problem(where, f"is missing: the run had {plural(world_size, 'rank')}")


def _check_resumes(events: RankEvents, section: Section, saved: set[int]) -> None:
    """A run resumes only from a step that was reached, or that the ledger has (killed between a save and its event)."""
    reached = 0
    for attempt in events.attempts:
        for event in attempt.events:
            if event.kind == "resume" and event.step > reached and event.step not in saved:
                what = f"resumes at step {event.step:,}, but the events above reach only step {reached:,}"
                section.problem(f"{events.where}, line {event.line}", what)
            reached = max(reached, event.step)
