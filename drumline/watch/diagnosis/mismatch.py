"""Ranks that do different things: in different collectives, or out of the loop while others are in
it; and ranks that left it last and do not exit."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drumline.base.text import duration
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
_ALONE = (
    Phase.BETWEEN,
    Phase.EVALUATION,
    Phase.SAVE,
    Phase.OPTIMIZER,
    Phase.DATA,
    Phase.START,
)

Signature = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Side:
    """Ranks that entered the same collective under the same number."""

    collective: Collective
    ranks: list[RankState]

    def text(self, who: str) -> str:
        """`ranks 0-2: all_reduce #12 (4x8)`."""
        return f"{who}: {collective_name(self.collective, with_sizes=True)}"


def find_mismatch(evidence: Evidence) -> Diagnosis | None:
    """Ranks that entered different collectives under the same number."""
    ranks = evidence.cluster.ranks
    sides = _first_mismatch(ranks)
    if not sides:
        return None

    deviating: Side | None = sides[1]
    if len(sides[0].ranks) == len(sides[1].ranks):
        deviating = _deviating_side(sides, ranks)
    is_known = deviating is not None
    deviating = deviating or sides[0]

    culprit = deviating.ranks[0]
    place = evidence.place(culprit)
    frame = users_frame(culprit.stack)
    if frame and is_known:
        place += f" ({frame})"
    shown = "; ".join(_side_texts(sides, deviating, is_known=is_known))
    what = f"ranks are in different collectives{place}: {shown}"

    next_step = (
        "make every rank call the same collectives in the same order with the same shapes (look for one behind "
        "`if rank == ...`, and for batches of different length)"
    )

    # A `break` in a user's own loop is not visible in a heartbeat: it may be the end of an epoch.
    if is_known and deviating.collective.op.endswith("barrier"):
        next_step = f"check whether it left the loop before the others; if not, {next_step}"

    diagnosis = evidence.diagnosis(
        culprit,
        Cause.MISMATCH,
        what,
        next_step,
        is_certain=True,
        since_s=min(rank.age_s for rank in deviating.ranks),
    )
    if is_known:
        return diagnosis

    hosts = dict.fromkeys(rank.host for side in sides for rank in side.ranks)
    what += "; it is unknown which one is wrong"
    return replace(diagnosis, rank=None, host=", ".join(hosts), what=what)


def _side_texts(sides: list[Side], deviating: Side, *, is_known: bool) -> list[str]:
    """Each side with its collective, the deviating one first."""
    texts = [deviating.text(names(deviating.ranks))]
    for side in sides:
        if side is deviating:
            continue

        are_the_others = is_known and len(sides) == 2 and len(side.ranks) > 1
        texts.append(side.text("the others" if are_the_others else names(side.ranks)))

    return texts


def _first_mismatch(ranks: Sequence[RankState]) -> list[Side]:
    """The first number at which ranks differ and which is not done on all of them: which ranks
    entered which collective, the largest side first. Empty: none. After an extra collective on one
    rank, its numbers are ahead by one."""
    is_broken = any(has_exited(rank) or rank.failure for rank in ranks)
    sides: dict[tuple[int, str], dict[Signature, Side]] = defaultdict(dict)
    not_done: set[tuple[int, str]] = set()

    for rank in ranks:
        for collective in rank.collectives:
            if collective.op.startswith(_BETWEEN_TWO):
                continue

            key = (collective.number, collective.group)
            side = sides[key].setdefault(_signature(collective), Side(collective, []))
            side.ranks.append(rank)
            if not collective.is_done:
                not_done.add(key)

    for key in sorted(sides):
        at_number = sides[key].values()
        if len(at_number) > 1 and (is_broken or key in not_done):
            return sorted(at_number, key=lambda side: (-len(side.ranks), side.ranks[0].rank))

    return []


def _signature(collective: Collective) -> Signature:
    """What must be the same on every rank."""
    has_same_sizes = collective.op.removeprefix("_").startswith(_SAME_SIZES)
    return collective.op, collective.sizes if has_same_sizes else ()


def _deviating_side(sides: list[Side], ranks: Sequence[RankState]) -> Side | None:
    """Among sides of equal size, the one that differs from what followed the same two collectives
    before; otherwise the one that never occurred before. None: each may be right."""
    here = sides[0].collective
    history: list[Signature] = []  # the part that is the same on all ranks
    for rank in ranks:
        earlier = [
            _signature(collective)
            for collective in rank.collectives
            if collective.group == here.group and collective.number < here.number
        ]
        history = max(history, earlier, key=len)

    ends = range(len(history) - 1, 1, -1)
    followers = [history[end] for end in ends if history[end - 2 : end] == history[-2:]]
    for expected in (set(followers[:1]), set(history)):
        strange = [side for side in sides if _signature(side.collective) not in expected]
        if len(strange) == 1:
            return strange[0]

    return None


def find_left_early(evidence: Evidence) -> Diagnosis | None:
    """Ranks that are out of the loop while others wait for them in it."""
    ranks = evidence.cluster.ranks
    left = list(filter(_is_outside, ranks))
    inside = [rank for rank in ranks if rank not in left]
    if not left or not any(_is_stopped_by(left, rank) for rank in inside):
        return None

    next_step = "give every rank the same number of batches (DDPManager.loader does)"
    if len(left) > len(inside):  # the few others are the odd ones
        first = inside[0]
        since_s = max(rank.age_s for rank in left)
        after = _after_step(evidence, max(rank.step for rank in left))
        what = f"{names(inside)} continued in the loop{after}, where {names(left)} left it"
    else:
        first = max(left, key=lambda rank: (rank.age_s, -rank.rank))
        since_s = None
        what = _left_first(evidence, first, left)
        next_step += ", and let no rank break or return on its own"

    disconnected = [rank for rank in inside if rank.failure]
    if disconnected:
        what += f"; {names(disconnected)} lost the connection"
    else:
        what += evidence.blocked_ranks(left)

    return evidence.diagnosis(
        first,
        Cause.LEFT_EARLY,
        what,
        next_step,
        is_certain=True,
        since_s=since_s,
    )


def _is_outside(rank: RankState) -> bool:
    """Whether it left the loop without an error, or was aborted by gloo in a collective after it."""
    was_aborted = rank.phase in OUT_OF_LOOP and rank.exit == -signal.SIGABRT
    return is_done(rank) or was_aborted


def _left_first(evidence: Evidence, first: RankState, left: list[RankState]) -> str:
    """Who left the loop, with how many others."""
    what = f"{name(first)} left the loop{_after_step(evidence, first.step)}"
    if first.exit is not None and first.exit >= 0:
        what += f" and exited with code {first.exit}"

    what += ", before the others"
    further = [rank for rank in left if rank is not first]
    if further:
        what += f"; so did {names(further)}"
    return what


def _after_step(evidence: Evidence, step: int) -> str:
    """Empty where steps are not counted."""
    return f" after step {step}" if evidence.has_steps else ""


def _is_stopped_by(left: list[RankState], rank: RankState) -> bool:
    """Whether this rank cannot continue without those that left the loop."""
    if rank.failure:
        return rank.failure_kind is FailureKind.LOST_PEER
    if has_exited(rank):
        return False

    entered = pending(rank)
    if entered is not None:
        identity = _identity(entered)
        return any(identity not in map(_identity, departed.collectives) for departed in left)

    # A rank in no collective may have work to do alone, such as a last report.
    return rank.phase not in _ALONE and not is_busy(rank) and is_blocked(rank)


def _identity(collective: Collective) -> tuple[str, int, Signature]:
    """Its number alone is not enough: another rank may have entered another collective under the
    same one."""
    return collective.group, collective.number, _signature(collective)


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
