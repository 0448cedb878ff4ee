"""Ranks that do different things: in different collectives, or out of the loop while others are in
it; and ranks that left it last and do not exit."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from drumline.base.text import duration, plural
from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis, collective_name, name, names
from drumline.watch.diagnosis.evidence import (
    OUT_OF_LOOP,
    Evidence,
    has_exited,
    is_blocked,
    is_busy,
    is_done,
    pending,
)
from drumline.watch.diagnosis.stack_frames import innermost, users_frame
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase

# In these every rank must have the same sizes; in scatter or gather some ranks have none.
_SAME_SIZES = (
    "all_reduce",
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
)
_BETWEEN_TWO = ("send", "recv")
# Phases in which the last ranks of a normal run may be after the others have left.
_ALONE = (Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE, Phase.OPTIMIZER, Phase.DATA, Phase.START)

Signature = tuple[str, tuple[tuple[int, ...], ...]]
Entry = tuple[RankState, Collective]


def find_mismatch(evidence: Evidence) -> Diagnosis | None:
    ranks = evidence.cluster.ranks
    sides = _first_mismatch(ranks)
    if not sides:
        return None
    odd = 1 if len(sides[0]) > len(sides[1]) else _deviating_side(sides, ranks)
    is_known = odd is not None
    culprits = [rank for rank, _ in sides[odd or 0]]
    op = sides[odd or 0][0][1]
    others = [side for position, side in enumerate(sides) if position != (odd or 0)]
    shown = [f"{names(culprits)}: {collective_name(op, with_sizes=True)}"]
    for side in others:
        are_others = is_known and len(others) == 1 and len(side) > 1
        who = "the others" if are_others else names([rank for rank, _ in side])
        shown.append(f"{who}: {collective_name(side[0][1], with_sizes=True)}")
    frame = users_frame(culprits[0].stack)
    place = f" ({frame})" if frame and is_known else ""
    # A `break` in a user's own loop is not visible in a heartbeat: it may be the end of an epoch.
    may_have_left = is_known and op.op.endswith("barrier")
    what = (
        f"ranks are in different collectives{evidence.at(culprits[0])}{place}: {'; '.join(shown)}"
    )
    next_step = (
        f"{'check whether it left the loop before the others; if not, ' if may_have_left else ''}make every rank call "
        "the same collectives in the same order with the same shapes (look for one behind `if rank == ...`, and for "
        "batches of different length)"
    )
    since_s = min(rank.age_s for rank in culprits)
    found = evidence.diagnosis(
        culprits[0], Cause.MISMATCH, what, next_step, is_certain=True, since_s=since_s
    )
    if is_known:
        return found
    hosts = dict.fromkeys(rank.host for side in sides for rank, _ in side)
    return replace(
        found, rank=None, host=", ".join(hosts), what=f"{what}; it is unknown which one is wrong"
    )


def _first_mismatch(ranks: Sequence[RankState]) -> list[list[Entry]]:
    """The first number at which ranks differ and which is not done on all of them: which ranks
    entered which collective, the largest group first. Empty: none. After an extra collective on one
    rank, its numbers are ahead by one."""
    is_broken = any(has_exited(rank) or rank.failure for rank in ranks)
    entries: dict[tuple[int, str], list[Entry]] = defaultdict(list)
    for rank in ranks:
        for one in rank.collectives:
            if not one.op.startswith(_BETWEEN_TWO):
                entries[one.number, one.group].append((rank, one))
    for _, entered in sorted(entries.items(), key=lambda item: item[0]):
        sides: dict[Signature, list[Entry]] = defaultdict(list)
        for rank, one in entered:
            sides[_signature(one)].append((rank, one))
        if len(sides) > 1 and (is_broken or not all(one.is_done for _, one in entered)):
            return sorted(sides.values(), key=lambda side: (-len(side), side[0][0].rank))
    return []


def _signature(one: Collective) -> Signature:
    """What must be the same on every rank."""
    return one.op, one.sizes if one.op.removeprefix("_").startswith(_SAME_SIZES) else ()


def _deviating_side(sides: list[list[Entry]], ranks: Sequence[RankState]) -> int | None:
    """Among sides of equal size, the one that differs from what followed the same two collectives
    before; otherwise the one that never occurred before. None: each may be right."""
    here = sides[0][0][1]
    histories = [
        [
            _signature(one)
            for one in rank.collectives
            if one.group == here.group and one.number < here.number
        ]
        for rank in ranks
    ]
    history = max(histories, key=len, default=[])  # the part that is the same on all ranks
    ends = range(len(history) - 1, 1, -1)
    followers = [history[end] for end in ends if history[end - 2 : end] == history[-2:]]
    for known in (set(followers[:1]), set(history)):
        strange = [
            position for position, side in enumerate(sides) if _signature(side[0][1]) not in known
        ]
        if len(strange) == 1:
            return strange[0]
    return None


def find_left_early(evidence: Evidence) -> Diagnosis | None:
    ranks = evidence.cluster.ranks
    # Left without an error, or aborted by gloo in a collective after the loop.
    left = [
        rank
        for rank in ranks
        if is_done(rank) or (rank.phase in OUT_OF_LOOP and rank.exit == -signal.SIGABRT)
    ]
    inside = [rank for rank in ranks if rank not in left]
    if not left or not any(_is_stopped_by(left, rank) for rank in inside):
        return None
    lost = [rank for rank in inside if rank.failure]
    who = names(lost) if len(lost) < 4 else plural(len(lost), "rank")
    consequences = f"; {who} lost the connection" if lost else evidence.blocked_ranks(left)
    next_step = "give every rank the same number of batches (DDPManager.loader does)"
    if len(left) > len(inside):  # the few others are the odd ones
        after = f" after step {max(rank.step for rank in left)}" if evidence.has_steps else ""
        first = inside[0]
        since_s = max(rank.age_s for rank in left)
        what = f"{names(inside)} continued in the loop{after}, where {names(left)} left it"
    else:
        first = max(left, key=lambda rank: (rank.age_s, -rank.rank))
        since_s = None
        after = f" after step {first.step}" if evidence.has_steps else ""
        exited = (
            f" and exited with code {first.exit}"
            if first.exit is not None and first.exit >= 0
            else ""
        )
        too = (
            f"; so did {names([rank for rank in left if rank is not first])}"
            if len(left) > 1
            else ""
        )
        what = f"{name(first)} left the loop{after}{exited}, before the others{too}"
        next_step += ", and let no rank break or return on its own"
    what += consequences
    return evidence.diagnosis(
        first, Cause.LEFT_EARLY, what, next_step, is_certain=True, since_s=since_s
    )


def _is_stopped_by(left: list[RankState], rank: RankState) -> bool:
    """Whether this rank cannot continue without those that left the loop."""
    if rank.failure:
        return rank.failure_kind is FailureKind.LOST_PEER
    if has_exited(rank):
        return False
    if (entered := pending(rank)) is not None:
        return any(_identity(entered) not in map(_identity, other.collectives) for other in left)
    # A rank in no collective may have work to do alone, such as a last report.
    return rank.phase not in _ALONE and not is_busy(rank) and is_blocked(rank)


def _identity(one: Collective) -> tuple[str, int, Signature]:
    """Its number alone is not enough: another rank may have entered another collective under the
    same one."""
    return one.group, one.number, _signature(one)


def find_teardown(evidence: Evidence) -> Diagnosis | None:
    """All ranks are out of the loop, and one does not exit."""
    closing = [
        rank for rank in evidence.ranks if rank.phase is Phase.LEAVING and not has_exited(rank)
    ]
    if not closing or evidence.in_loop:
        return None
    rank = max(closing, key=lambda rank: (rank.age_s, -rank.rank))
    place = f" ({innermost(rank.stack)})" if rank.stack else ""
    what = (
        f"{name(rank)} left the loop {duration(rank.age_s)} ago and has not exited: it is closing its files, workers "
        f"and process group{place}"
    )
    next_step = "check in its stack what it waits for; release CUDA graphs before the process group is destroyed"
    return evidence.diagnosis(rank, Cause.TEARDOWN, what, next_step)
