"""Ranks that left the loop while others are still in it; and those that left it last, and do not exit."""

from __future__ import annotations

import signal

from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.error_texts import is_lost_peer
from drumline.watch.diagnosis.evidence import (
    ORDERLY_EXITS,
    OUT,
    Evidence,
    has_ended,
    is_busy,
    is_done,
    pending,
    seems_to_wait,
)
from drumline.watch.diagnosis.mismatch import signature
from drumline.watch.diagnosis.phrases import name, names, seconds, who_waits
from drumline.watch.diagnosis.stack_frames import innermost
from drumline.watch.heartbeat import Phase

# What the last ranks of a run do that ends in order, after others have left.
_ENDING = (Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE, Phase.OPTIMIZER)


def judge_left(evidence: Evidence) -> Diagnosis | None:
    ranks = evidence.picture.ranks
    left = [rank for rank in ranks if _has_left(rank)]
    staying = [rank for rank in ranks if not _has_left(rank)]
    if not left or not any(_needs_them(rank, left) for rank in staying):
        return None
    if len(left) > len(staying):
        return _goes_on(evidence, left, staying)
    first = max(left, key=lambda rank: (rank.age_s, -rank.rank))
    ended = f" and has ended with exit code {first.exit}" if first.exit in ORDERLY_EXITS else ""
    too = f"; so did {names([rank for rank in left if rank is not first])}" if len(left) > 1 else ""
    after = f" after step {first.step}" if evidence.has_steps else ""
    return evidence.about(
        first,
        Cause.LEFT_EARLY,
        what=f"{name(first)} left the loop{after}{ended}, before the others{too}{_rest(evidence, left, staying)}",
        next_step="give every rank the same number of batches (DDPManager.loader does), and let no rank break or "
        "return on its own",
        is_certain=True,
    )


def _has_left(rank: RankState) -> bool:
    """In order, or to be ended by gloo in a collective that comes after the loop."""
    return is_done(rank) or (rank.phase in OUT and rank.exit == -signal.SIGABRT)


def _goes_on(evidence: Evidence, left: list[RankState], staying: list[RankState]) -> Diagnosis:
    """Most have left: then it is the few others who are odd."""
    first = staying[0]
    after = f" after step {max(rank.step for rank in left)}" if evidence.has_steps else ""
    return evidence.about(
        first,
        Cause.LEFT_EARLY,
        what=f"{names(staying)} went on in the loop{after}, where {names(left)} left it"
        f"{_rest(evidence, left, staying)}",
        next_step="give every rank the same number of batches (DDPManager.loader does)",
        is_certain=True,
        since_s=max(rank.age_s for rank in left),
    )


def _needs_them(rank: RankState, left: list[RankState]) -> bool:
    """Whether this one cannot go on: it is in a collective that those who left never entered, or lost them."""
    if rank.failure:
        return is_lost_peer(rank.failure)
    if has_ended(rank):
        return False
    waits = pending(rank)
    if waits is not None:
        return any(not _has_entered(gone, waits) for gone in left)
    # One that is in no collective has work of its own to do, as a last report.
    return rank.phase not in (*_ENDING, Phase.DATA, Phase.START) and not is_busy(rank) and seems_to_wait(rank)


def _has_entered(rank: RankState, waits: Collective) -> bool:
    """It, and not another one that has its number by now."""
    return any(
        (one.group, one.number, signature(one)) == (waits.group, waits.number, signature(waits))
        for one in rank.collectives
    )


def _rest(evidence: Evidence, left: list[RankState], staying: list[RankState]) -> str:
    lost = [rank for rank in staying if rank.failure]
    if lost:
        return (
            f"; {names(lost)} lost the connection"
            if len(lost) < 4
            else f"; {len(lost)} ranks lost the connection"
        )
    return who_waits(evidence, left)


def judge_teardown(evidence: Evidence) -> Diagnosis | None:
    """All ranks are out of the loop, and one is still being closed."""
    closing = [rank for rank in evidence.ranks if rank.phase is Phase.LEAVING and not has_ended(rank)]
    if not closing or evidence.in_loop:
        return None
    rank = max(closing, key=lambda rank: (rank.age_s, -rank.rank))
    frame = innermost(rank.stack)
    return evidence.about(
        rank,
        Cause.TEARDOWN,
        what=f"{name(rank)} left the loop {seconds(rank.age_s)} ago and has not exited: it closes its files, its "
        f"workers and the process group{f', in {frame}' if frame else ''}",
        next_step="see what it waits for in the stack; release CUDA graphs with collectives in them before the process "
        "group is destroyed",
    )
