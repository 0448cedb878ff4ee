"""Ranks that have exited or failed: which was the first, and why. A rank with its own cause (a
signal, its own error, an exit code) comes before those that lost a connection because of it."""

from __future__ import annotations

import signal
from dataclasses import replace

from drumline.base.text import duration, plural, signal_name
from drumline.watch.cluster_state import RankState
from drumline.watch.diagnosis.diagnosis import (
    Cause,
    Diagnosis,
    Explanation,
    collective_name,
    name,
    names,
)
from drumline.watch.diagnosis.evidence import Evidence, has_ended, has_exited, is_done, pending
from drumline.watch.diagnosis.mismatch import find_left_early
from drumline.watch.diagnosis.stack_frames import innermost, is_in_collective, operation
from drumline.watch.diagnosis.unreachable import find_never_seen, find_unreachable, may_be_lost
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase

# A launcher sends these to the other ranks when one has exited, or to all when the user stops the
# job.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REQUESTED_EXITS = (*(-number for number in _REQUESTS), *(128 + number for number in _REQUESTS))
_WAIT_S = 2.5
_MAX_WAIT_S = 4.5
"""It takes some seconds to know that a host is lost. After the longer one the diagnosis is made
anyway: the launcher waits 5.5 s for it, and collecting evidence again takes time."""

# how long after a host was lost its last heartbeat may be read on a busy one
_READ_LATE_S = 0.9

# exits closer together than this count as simultaneous: processes are observed five times a second
_AT_ONCE_S = 1.0
_NEXT_STEPS = {
    FailureKind.DISK_FULL: "free some space on that file system, then rerun the same command to resume from the newest "
    "complete checkpoint",
    FailureKind.OUT_OF_MEMORY: "lower the batch size, or accumulate over more micro-batches",
    FailureKind.WORKER_DIED: "check the kernel log (dmesg) for what killed the worker: often it is out of memory",
}
_CRASHED = "check the end of its log: a library crashed in it (a full /dev/shm gives SIGBUS)"
_AFTER_SIGNAL: dict[int, str] = {
    signal.SIGABRT: "check the end of its log: a library aborted, as gloo does when ranks enter different collectives",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE), _CRASHED),
}


def find_exited(evidence: Evidence) -> Diagnosis | None:
    """The first rank that exited for its own reason; otherwise the first that drumline itself
    killed, and why."""
    # An exit is final: the last state of a node that is now lost still counts.
    culprits = [
        rank
        for rank in evidence.cluster.ranks
        if has_ended(rank)
        and not is_done(rank)
        and rank.failure_kind is not FailureKind.LOST_PEER
        and not _was_asked_to_stop(rank)
        and not _was_ended(rank)
    ]
    if any(rank.exit is not None for rank in culprits):
        # A launcher that records exits does not record those that it caused.
        culprits = list(filter(_has_reason, culprits))

    if not culprits:
        # The reason is known, and what else is seen follows from the kill.
        by_drumline = [rank for rank in evidence.cluster.ranks if rank.killed_because]
        return _diagnosis(evidence, _first(by_drumline)) if by_drumline else None

    first = _first(culprits)
    if _has_mismatch(first):
        # A rank that left the loop calls other collectives: then that is the cause.
        mismatch = find_left_early(evidence) or _aborted_by_gloo(evidence, first, culprits)
        if mismatch is not None:
            return mismatch

    if any(map(_has_reason, culprits)):
        return _diagnosis(evidence, first)

    # It is unknown why these exited: their launcher may have ended them because a host was lost.
    if find_unreachable(evidence) or find_never_seen(evidence):
        return None
    return _exit(evidence, culprits)


def _has_reason(rank: RankState) -> bool:
    """Whether something shows why it exited."""
    return rank.exit is not None or bool(rank.failure or rank.memory)


def find_lost_connection(evidence: Evidence) -> Diagnosis | None:
    """No rank has its own cause: the first that lost a connection, which is not the cause
    itself."""
    ranks = evidence.cluster.ranks
    requested = [rank for rank in ranks if _was_asked_to_stop(rank)]
    asked_to_stop = [rank for rank in requested if not _was_ended(rank)]
    if asked_to_stop:
        is_whole_job = len(requested) == len(ranks)  # the user stops it
        is_reported = all(is_done(rank) or rank.killed_after_s is not None for rank in ranks)
        return None if is_whole_job or is_reported else _exit(evidence, asked_to_stop)

    lost = [
        rank for rank in ranks if has_ended(rank) and not is_done(rank) and not _was_ended(rank)
    ]
    if not lost:
        return None

    first = _first(lost)
    cause = Cause.MISMATCH if first.failure_kind is FailureKind.MISMATCH else Cause.EXCEPTION
    error = f": {first.failure}" if first.failure else ""
    what = (
        f"{name(first)} lost its connection to the other ranks{evidence.place(first)}{error}; no rank was seen to fail "
        "before it"
    )
    next_step = "check the ends of all ranks' logs for what came first, and the network with drumline doctor"

    ago_s = _ago_s(first)
    is_late = ago_s >= _WAIT_S or all(map(has_exited, ranks))
    is_certain = is_late and not _may_follow_a_lost_host(evidence, ago_s)
    return evidence.diagnosis(
        first,
        cause,
        what,
        next_step,
        is_certain=is_certain,
        since_s=ago_s,
    )


def _exit(evidence: Evidence, ranks: list[RankState]) -> Diagnosis:
    """That the first of these exited: certain unless a host may have been lost before."""
    diagnosis = _diagnosis(evidence, _first(ranks))
    is_certain = not _may_follow_a_lost_host(evidence, diagnosis.since_s)
    return replace(diagnosis, is_certain=is_certain)


def _may_follow_a_lost_host(evidence: Evidence, ago_s: float) -> bool:
    """Whether a host may have been lost before, so that its peers lost their connections, or were
    ended."""
    return ago_s < _MAX_WAIT_S and may_be_lost(evidence.cluster, ago_s - _READ_LATE_S)


def _has_mismatch(rank: RankState) -> bool:
    """Whether it ended as gloo ends a rank that entered another collective than its peers."""
    return rank.exit == -signal.SIGABRT or rank.failure_kind is FailureKind.MISMATCH


def _was_asked_to_stop(rank: RankState) -> bool:
    """Whether a launcher or a user ended it."""
    is_request = rank.exit in _REQUESTED_EXITS or rank.killed_after_s is not None
    return is_request or rank.failure_kind is FailureKind.INTERRUPTED


def _was_ended(rank: RankState) -> bool:
    """Whether it only exited because drumline asked it to; a rank that did not is reported."""
    has_failed = bool(rank.failure) and rank.failure_kind is not FailureKind.LOST_PEER
    has_own_reason = has_failed or bool(rank.memory) or rank.killed_after_s is not None
    return rank.asked_to_exit and not has_own_reason


def _ago_s(rank: RankState) -> float:
    """How long ago it exited or failed."""
    if not has_exited(rank):
        return rank.age_s

    # It may have reported its error some time before it exited.
    exited_s = rank.state_s if rank.state in "XZ" else 0.0
    failed_s = rank.age_s if rank.failure else 0.0
    return max(exited_s, failed_s)


def _strength(rank: RankState) -> int:
    """How certain it is that this rank did not exit because of another."""
    if rank.memory or (rank.exit is not None and rank.exit < 0) or rank.failure:
        return 3

    # A rank that exited for an unknown reason comes before one with an exit code.
    return 2 if rank.exit is None else 1


def _first(ranks: list[RankState]) -> RankState:
    """The rank that exited first; among those that exited at once, the one with the clearest
    cause."""
    longest = max(map(_ago_s, ranks))
    early = [rank for rank in ranks if _ago_s(rank) >= longest - _AT_ONCE_S]
    return max(early, key=lambda rank: (_strength(rank), _ago_s(rank), -rank.rank))


def _diagnosis(evidence: Evidence, rank: RankState) -> Diagnosis:
    """That this rank exited or failed, why, and how many lost the connection to it."""
    explanation = _explain(rank, evidence.place(rank))
    what = f"{name(rank)} {explanation.text}"
    num_disconnected = sum(
        peer is not rank and peer.failure_kind is FailureKind.LOST_PEER for peer in evidence.ranks
    )
    if num_disconnected:
        what += f"; {plural(num_disconnected, 'rank')} lost the connection to it"

    return evidence.diagnosis(
        rank,
        explanation.cause,
        what,
        explanation.next_step,
        is_certain=True,
        since_s=_ago_s(rank),
    )


def _explain(rank: RankState, place: str) -> Explanation:
    """Why it exited. `place`: at which step and in which phase."""
    after_error = _NEXT_STEPS.get(rank.failure_kind, "read its traceback at the end of its log")
    if rank.memory:
        return Explanation(
            Cause.OUT_OF_MEMORY,
            f"ran out of memory and was killed{place} ({rank.memory})",
            "raise the memory limit, or lower the batch size or the number of DataLoader workers",
        )

    if rank.killed_after_s is not None:
        next_step = "check the end of its log for what it was doing"
        if rank.killed_because:
            next_step = "look for the cause of that; the ranks resume from the newest checkpoint"
        return Explanation(Cause.ENDED, _own_kill(rank, place), next_step)

    if rank.failure:
        return Explanation(Cause.EXCEPTION, f"crashed{place}: {rank.failure}", after_error)

    if rank.exit is None:
        return Explanation(
            Cause.KILLED,
            f"exited{place}{',' if place else ''} for an unknown reason",
            f"check the end of its log, and the kernel log on {rank.host} (dmesg)",
        )

    if rank.exit >= 0:
        return Explanation(Cause.EXCEPTION, f"exited with code {rank.exit}{place}", after_error)

    sender = f"find out who sent it: an operator, a batch system, or the kernel's OOM killer (dmesg on {rank.host})"

    return Explanation(
        Cause.KILLED,
        f"was killed by {signal_name(-rank.exit)}{place}",
        _AFTER_SIGNAL.get(-rank.exit, sender),
    )


def _own_kill(rank: RankState, place: str) -> str:
    """By which part of drumline it was killed, and why."""
    how = f"was killed by drumline's {rank.killed_by or 'launcher'}{place}"
    if rank.killed_after_s:
        how += f", {duration(rank.killed_after_s)} after it was asked to exit"
    return f"{how}, because {rank.killed_because}" if rank.killed_because else how


def _aborted_by_gloo(
    evidence: Evidence,
    first: RankState,
    culprits: list[RankState],
) -> Diagnosis | None:
    """Gloo aborts a process (SIGABRT) when more data arrives than it expects: ranks had entered
    different collectives. Its message is only in the rank's log, so this is concluded from where
    the rank was."""
    was_in_collective = first.phase in (Phase.BACKWARD, Phase.BETWEEN)
    if first.stack:
        was_in_collective = is_in_collective(first.stack)
    if not was_in_collective and first.failure_kind is not FailureKind.MISMATCH:
        return None

    ranks = evidence.cluster.ranks
    aborted = [rank for rank in culprits if _has_mismatch(rank)]
    intact = [rank for rank in ranks if rank not in aborted]

    # Ranks that received too much are aborted; if that is most of them, the one that sent it is
    # left.
    odd = intact if 0 < len(intact) < len(aborted) else aborted
    even = [rank for rank in ranks if rank not in odd]
    what = (
        f"{_odd_ones(evidence, odd)}: {_sides(odd, even)}gloo aborted {names(aborted)} (SIGABRT), as it does when a "
        "rank receives more data than it expects"
    )
    next_step = (
        "make every rank call the same collectives in the same order with the same shapes; the log of rank "
        f"{aborted[0].rank} has the sizes in bytes"
    )
    return evidence.diagnosis(
        odd[0],
        Cause.MISMATCH,
        what,
        next_step,
        is_certain=True,
        since_s=_ago_s(first),
    )


def _odd_ones(evidence: Evidence, ranks: list[RankState]) -> str:
    """Who entered another collective than the others, and where."""
    first = ranks[0]
    what = f"{names(ranks)} entered a different collective than the others, or one with a different size"
    if place := evidence.place(first):
        what += f",{place}"
    if first.stack:
        what += f" ({innermost(first.stack)})"
    return what


def _sides(odd: list[RankState], even: list[RankState]) -> str:
    """`rank 1: all_reduce #4 (3); the others: all_reduce #4 (4); `, as far as it is known."""
    text = ""
    for side_name, ranks in ((names(odd), odd), ("the others", even)):
        if collective := _entered(ranks):
            text += f"{side_name}: {collective}; "
    return text


def _entered(ranks: list[RankState]) -> str:
    """The collective that the first of them was in, by its flight recorder, otherwise by its
    stack."""
    for rank in ranks:
        if rank.collectives:
            return collective_name(pending(rank) or rank.collectives[-1], with_sizes=True)

    return next(filter(None, (operation(rank.stack) for rank in ranks)), "")
