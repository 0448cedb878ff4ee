"""The events of every rank: none missing, none damaged, and each start of the job continues what came before."""

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
    """What the events say of the rest of the folder."""

    is_numbered: bool
    """As events have been since there is a ledger."""
    has_started: bool
    """Whether any rank came as far as its start, which is after the settings are written."""
    stands: SeenEvent | None
    """The latest save of rank 0, or resume: the checkpoint that it names stays until a newer one is whole."""
    known: frozenset[int]
    """The steps of all saves and resumes of rank 0."""
    has_saved: bool
    has_rank_0: bool
    """Whether rank 0's events could be read here."""


def check_events(
    folder: Path, part: Section, *, history: History | None, hosts: dict[int, str], is_at_work: bool
) -> EventSummary:
    """Read all event files. `history`: what the ledger vouches for; `hosts`: where the ranks last ran."""
    found = _read_all(folder, part)
    _check_ranks_are_there(folder.name, found, part, hosts)
    readable = {rank: events for rank, events in found.items() if events.is_readable}
    if 0 in readable:
        _check_resumes(found[0], part, set() if history is None else history.saved_steps)
        check_attempts(readable, part, history, is_at_work=is_at_work)
    count = sum(events.num_events for events in found.values())
    attempts = len(found[0].attempts) if 0 in found else 0
    part.counts = {"ranks": len(found), "events": count, "attempts": attempts}
    missing = "" if part.problems else ", none missing"
    part.summary = (
        f"{plural(count, 'event')} of {plural(len(found), 'rank')} in {plural(attempts, 'attempt')}{missing}"
    )
    return _sum_up(found)


def _read_all(folder: Path, part: Section) -> dict[int, RankEvents]:
    found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        if (named := NAME.fullmatch(path.name)) is None:
            part.note(f"{folder.name}/{path.name}", "is no rank's file, and was not read")
            continue
        found[int(named[1])] = read_rank(path, int(named[1]), part)
    return found


def _sum_up(found: dict[int, RankEvents]) -> EventSummary:
    attempts = [attempt for rank in found.values() for attempt in rank.attempts]
    of_rank_0 = found[0].attempts if 0 in found else []
    saves = [event for attempt in of_rank_0 for event in attempt.events if event.kind == "checkpoint"]
    resumes = [event for attempt in of_rank_0 for event in attempt.events if event.kind == "resume"]
    return EventSummary(
        is_numbered=any(events.num_events > events.num_unnumbered for events in found.values()),
        has_started=any(attempt.world_size is not None for attempt in attempts),
        stands=max([*saves, *resumes], key=lambda event: event.line, default=None),
        known=frozenset(event.step for event in [*saves, *resumes]),
        has_saved=bool(saves),
        has_rank_0=0 in found and found[0].is_readable,
    )


def _check_ranks_are_there(
    folder: str, found: dict[int, RankEvents], part: Section, hosts: dict[int, str]
) -> None:
    sizes = [attempt.world_size for rank in found.values() for attempt in rank.attempts]
    world_size = max((size for size in sizes if size is not None), default=len(hosts))
    shared = {hosts.get(rank) for rank in found}
    absent = (rank for rank in range(world_size) if rank not in found)
    for rank in islice(absent, MOST_NAMED):
        where, host = f"{folder}/rank-{rank:05d}.jsonl", hosts.get(rank)
        if host is not None and host not in shared and 0 in found:
            part.note(
                where, f"is not here; rank {rank} ran on {host}, which may keep it in a folder of its own"
            )
        else:
            part.problem(where, f"is missing: the run had {plural(world_size, 'rank')}")


def _check_resumes(events: RankEvents, part: Section, saved: set[int]) -> None:
    """A run can go on only from a step that was reached. (Killed between a save and its event, the ledger knows it.)"""
    reached = 0
    for attempt in events.attempts:
        for event in attempt.events:
            if event.kind == "resume" and event.step > reached and event.step not in saved:
                part.problem(
                    f"{events.where}, line {event.line}",
                    f"resumes at step {event.step:,}, but nothing above goes beyond {reached:,}",
                )
            reached = max(reached, event.step)
