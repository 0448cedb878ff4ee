"""Ranks that left the training loop while others are still in it; and those that left it last and do not exit."""

from __future__ import annotations

import signal

from drumline.text import duration, plural
from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis, name, names
from drumline.watch.diagnosis.evidence import (
    ORDERLY_EXITS,
    OUT_OF_LOOP,
    Evidence,
    has_exited,
    is_busy,
    is_done,
    pending,
    seems_blocked,
)
from drumline.watch.diagnosis.mismatch import signature
from drumline.watch.diagnosis.stack_frames import innermost
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase

# What the last ranks of a run that ends in order do after others have left, alone.
_ALONE = (Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE, Phase.OPTIMIZER, Phase.DATA, Phase.START)


def find_left_early(evidence: Evidence) -> Diagnosis | None:
    ranks = evidence.cluster.ranks
    left = [rank for rank in ranks if _has_left(rank)]
    inside = [rank for rank in ranks if not _has_left(rank)]
    if not left or not any(_needs(rank, left) for rank in inside):
        return None
    lost = [rank for rank in inside if rank.failure]
    who = names(lost) if len(lost) < 4 else plural(len(lost), "rank")
    consequences = f"; {who} lost the connection" if lost else evidence.blocked_ranks(left)
    next_step = "give every rank the same number of batches (DDPManager.loader does)"
    if len(left) > len(inside):  # the few others are the odd ones
        after = f" after step {max(rank.step for rank in left)}" if evidence.has_steps else ""
        first, since_s = inside[0], max(rank.age_s for rank in left)
        what = f"{names(inside)} continued in the loop{after}, where {names(left)} left it"
    else:
        first, since_s = max(left, key=lambda rank: (rank.age_s, -rank.rank)), None
        after = f" after step {first.step}" if evidence.has_steps else ""
        exited = f" and exited with code {first.exit}" if first.exit in ORDERLY_EXITS else ""
        too = f"; so did {names([rank for rank in left if rank is not first])}" if len(left) > 1 else ""
        what = f"{name(first)} left the loop{after}{exited}, before the others{too}"
        next_step += ", and let no rank break or return on its own"
    what = f"{what}{consequences}"
    return evidence.diagnosis(first, Cause.LEFT_EARLY, what, next_step, is_certain=True, since_s=since_s)


def _has_left(rank: RankState) -> bool:
    """In order, or aborted by gloo in a collective that comes after the loop."""
    return is_done(rank) or (rank.phase in OUT_OF_LOOP and rank.exit == -signal.SIGABRT)


def _needs(rank: RankState, left: list[RankState]) -> bool:
    """Whether this one cannot continue: it is in a collective that those who left did not enter, or lost them."""
    if rank.failure:
        return rank.failure_kind is FailureKind.LOST_PEER
    if has_exited(rank):
        return False
    if (waits := pending(rank)) is not None:
        return any(not _has_entered(one, waits) for one in left)
    # One that is in no collective has work of its own to do, such as a last report.
    return rank.phase not in _ALONE and not is_busy(rank) and seems_blocked(rank)


def _has_entered(rank: RankState, waits: Collective) -> bool:
    """This one, and not another with the same number."""
    wanted = (waits.group, waits.number, signature(waits))
    return any((one.group, one.number, signature(one)) == wanted for one in rank.collectives)


def find_teardown(evidence: Evidence) -> Diagnosis | None:
    """All ranks are out of the loop, and one does not exit."""
    closing = [rank for rank in evidence.ranks if rank.phase is Phase.LEAVING and not has_exited(rank)]
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
