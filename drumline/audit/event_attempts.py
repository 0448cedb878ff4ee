"""Compares the attempts of a job across ranks and with the ledger: are the last events of any of them lost?

Numbers show a gap, not a lost tail. A lost tail shows in what all ranks do together: the mean in a `train` or
`evaluation` event is summed over all ranks, so when one rank has reported it, every other one has reported the one
before. A line of the ledger is gathered from all ranks, so each has reported what was due by that step; and rank 0
reports each save before the next begins. A kill may come just before an event is written: where a lost event and one
that was never written look the same, nothing is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from drumline.audit.event_files import Attempt, RankEvents
from drumline.audit.ledger_history import History
from drumline.audit.section import Section
from drumline.text import plural

Group = dict[int, Attempt]
"""One attempt of the job, by rank."""
Left = TypeVar("Left")
Right = TypeVar("Right")
Key = tuple[int | None, int | None]
"""World size, and the step that it resumed from."""


def check_attempts(
    found: dict[int, RankEvents], section: Section, history: History | None, *, is_at_work: bool
) -> None:
    """Compare the ranks with the ledger and then, where that shows nothing, with each other."""
    groups = [{0: attempt} for attempt in _started(found[0])]
    for rank in sorted(found.keys() - {0}):
        theirs = [group for group in groups if (group[0].world_size or 0) > rank]
        for group, attempt in _pair_up(theirs, _started(found[rank]), lambda group: _key(group[0]), _key):
            group[rank] = attempt
    reported = set() if history is None else _check_against_ledger(found, groups, section, history)
    if not is_at_work:
        _check_counts(found, section)
    # While a job is running, the files that are read later are ahead of those before.
    for group in groups[: len(groups) - is_at_work]:
        for rank in group:
            if id(group[rank]) not in reported and (what := _lacks(rank, group)) is not None:
                _report(found[rank], group[rank], section, what)


def _started(events: RankEvents) -> list[Attempt]:
    return [attempt for attempt in events.attempts if attempt.world_size is not None]


def _key(attempt: Attempt) -> Key:
    return attempt.world_size, attempt.resumed


def _pair_up(
    left: Sequence[Left], right: Sequence[Right], left_key: Callable[[Left], Key], right_key: Callable[[Right], Key]
) -> list[tuple[Left, Right]]:
    """In order if both sides have as many, which agree; else those whose key is unique on both sides."""
    left_keys, right_keys = list(map(left_key, left)), list(map(right_key, right))
    if len(left) == len(right) and all(map(_agree, left_keys, right_keys)):
        return list(zip(left, right, strict=True))
    unique = [{key for key, count in Counter(keys).items() if count == 1} for keys in (left_keys, right_keys)]
    by_key = dict(zip(right_keys, right, strict=True))
    return [(one, by_key[key]) for one, key in zip(left, left_keys, strict=True) if key in unique[0] & unique[1]]


def _agree(left: Key, right: Key) -> bool:
    """World size and step; one that was killed early, or has lost its tail, does not have the step."""
    return left[0] == right[0] and (left[1] == right[1] or None in (left[1], right[1]))


def _check_against_ledger(
    found: dict[int, RankEvents], groups: list[Group], section: Section, history: History
) -> set[int]:
    """Returns the ids of the attempts that were reported."""
    reported = set()
    num_saved = sum(map(bool, history.saves))
    if num_saved > len(found[0].attempts):
        counts = plural(len(found[0].attempts), "attempt"), plural(num_saved, "start")
        section.problem(found[0].where, f"has {counts[0]}, but the ledger has {counts[1]} with saves")
    starts = list(zip(history.starts, history.saves, strict=True))
    pairs = _pair_up(
        starts, groups, lambda pair: (pair[0].world_size, pair[0].step or None), lambda group: _key(group[0])
    )
    for (_, saves), group in pairs:
        for rank, attempt in group.items():
            if saves and _falls_short(rank, group, saves):
                _report(found[rank], attempt, section, f"but the ledger reaches step {saves[-1]:,}")
                reported.add(id(attempt))
    return reported


def _falls_short(rank: int, group: Group, saves: list[int]) -> bool:
    attempt = group[rank]
    if rank == 0 and len(saves) > 1 and saves[-2] > max(attempt.steps_of("checkpoint"), default=-1):
        return True
    due = _due(group, saves[-1])
    return due is not None and due > max(attempt.steps_of("train"), default=0)


def _due(group: Group, step: int) -> int | None:
    """The last step up to this one at which all ranks have logged; None: unknown."""
    totals = {attempt.total_steps for attempt in group.values()} - {None}
    if step in totals:
        return step
    for attempt in group.values():
        logged = [logged for logged in attempt.steps_of("train") if logged not in totals]
        begin = attempt.resumed or 0
        every = logged[-1] - logged[-2] if len(logged) > 1 else sum(logged) if begin == 0 else 0
        if every > 0:
            due = step // every * every
            return due if due > begin else None
    return None


def _check_counts(found: dict[int, RankEvents], section: Section) -> None:
    """An attempt that logged on one rank has started on all of them."""
    for rank in sorted(found.keys() - {0}):
        mine = _started(found[rank])
        theirs = [one for one in _started(found[0]) if (one.world_size or 0) > rank]
        for events, have, other, needed in (
            (found[rank], len(mine), 0, _num_logged(theirs)),
            (found[0], len(theirs), rank, _num_logged(mine)),
        ):
            if have < needed:
                ranks = f"with rank {rank}" if events.rank == 0 else "of it"
                what = f"has {plural(have, 'attempt')} {ranks}, but rank {other} has {needed} that took steps"
                section.problem(events.where, what)


def _num_logged(attempts: list[Attempt]) -> int:
    return sum(attempt.last_of("train") is not None for attempt in attempts)


def _lacks(rank: int, group: Group) -> str | None:
    """What this rank must have reported, and has not."""
    shared = {
        other: [(event.step, event.kind) for event in attempt.events if event.kind in ("train", "evaluation")]
        for other, attempt in group.items()
    }
    ahead = max(group, key=lambda other: (max(shared[other], default=(0, ""))[0], len(shared[other])))
    needed = shared[ahead] if _is_past(group, ahead, shared[ahead][-1:]) else shared[ahead][:-1]
    if needed and needed[-1] not in shared[rank] and needed[-1][0] >= max(shared[rank], default=(0, ""))[0]:
        step, kind = needed[-1]
        return f"but rank {ahead} has the {kind} event of step {step:,}"
    return _lacks_end(rank, group)


def _is_past(group: Group, ahead: int, last: list[tuple[int, str]]) -> bool:
    """Whether all ranks took part in something after the last event of the one that is ahead."""
    saved = group[0].last_of("checkpoint")
    return group[ahead].last_of("end") is not None or (saved is not None and last != [] and saved.step >= last[0][0])


def _lacks_end(rank: int, group: Group) -> str | None:
    if group[rank].last_of("end", "error") is not None:
        return None
    for other, attempt in group.items():
        if (end := attempt.last_of("end")) is None:
            continue
        # Rank 0 is the last to end, as it saves; killed in that save, it leaves the others' ends behind.
        if other == 0 or (rank == 0 and end.step in group[0].steps_of("checkpoint")):
            return f"the end is missing, which rank {other} reported"
    return None


def _report(events: RankEvents, attempt: Attempt, section: Section, what: str) -> None:
    # The last line may be a checkpoint's, which is complete only some steps after its own.
    last, step = attempt.events[-1], max(event.step for event in attempt.events)
    stops = f"the events stop at step {step:,}, " if what.startswith("but") else ""
    section.problem(f"{events.where}, line {last.line}", f"{stops}{what}")
