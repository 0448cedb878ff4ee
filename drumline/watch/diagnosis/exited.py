"""Ranks that have ended: which was the first, and by what.

When one rank is gone its peers fail within milliseconds, for want of it, and their launcher ends the rest. So a rank
that ended by itself (a signal, its own error, an exit code) is believed before one that lost a connection, and among
those the one that ended first.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from drumline.watch.cluster_state import RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.error_texts import ended_on_request, is_lost_peer, is_mismatch
from drumline.watch.diagnosis.evidence import Evidence, has_ended, is_done, pending
from drumline.watch.diagnosis.left_loop import judge_left
from drumline.watch.diagnosis.phrases import at, collective, count, name, names, signal_name
from drumline.watch.diagnosis.stack_frames import innermost, is_meeting, operation
from drumline.watch.diagnosis.unreachable import may_be_gone
from drumline.watch.heartbeat import Phase

_ECHO_S, _LONGEST_ECHO_S = 2.5, 3.2
"""A host that is gone is known to be after some seconds only. By the longer one it is told all the same: the launcher
waits 4 s for a word, and to look once more takes its time."""
_AT_ONCE_S = 1.0
"""Endings that lie closer together than this are taken for simultaneous: each is seen five times a second."""


def judge_ended(evidence: Evidence) -> Diagnosis | None:
    """The rank that ended by itself, and first."""
    # An ending is for good: the last word of a node that is silent by now still holds.
    ranks = evidence.picture.ranks
    own = _not_ended_by_launcher([rank for rank in ranks if _has_own_end(rank)])
    if not own:
        return None
    first = _first(own)
    if first.exit == -signal.SIGABRT or is_mismatch(first.failure):
        # Who leaves the loop goes on to other collectives: then that is the reason.
        torn = judge_left(evidence) or _torn_by_mismatch(evidence, first, own)
        if torn is not None:
            return torn
    also = [rank for rank in own if rank is not first and _strength(rank) >= 2]
    return _diagnosis(evidence, first, f"; {names(also)} ended by {_theirs(also)} too" if also else "")


def judge_lost_peers(evidence: Evidence) -> Diagnosis | None:
    """Nobody has an own reason: what the first to lose a connection says, and that it is not the cause."""
    ranks = evidence.picture.ranks
    asked = [rank for rank in ranks if ended_on_request(rank)]
    if asked:
        # All of them: somebody stops the job, and knows. A few: somebody hit these.
        if len(asked) == len(ranks):
            return None
        hit = _diagnosis(evidence, _first(asked), "")
        return replace(hit, is_certain=not _may_be_an_echo(evidence, hit.since_s))
    lost = [rank for rank in ranks if _ago(rank) is not None and not is_done(rank)]
    if not lost:
        return None
    first = _first(lost)
    told = f": {first.failure}" if first.failure else ""
    return evidence.about(
        first,
        Cause.MISMATCH if is_mismatch(first.failure) else Cause.EXCEPTION,
        what=f"{name(first)} lost its connection to the other ranks{at(evidence, first)}{told}; "
        "no rank was seen to end before it",
        next_step="see the ends of all ranks' logs for what came first, and drumline doctor for the network",
        is_certain=not _may_be_an_echo(evidence, _ago(first) or 0.0)
        and ((_ago(first) or 0.0) >= _ECHO_S or all(map(has_ended, ranks))),
        since_s=_ago(first) or 0.0,
    )


def _may_be_an_echo(evidence: Evidence, ago_s: float) -> bool:
    """Whether it may yet come out that a host was gone before: then its peers have lost their connections, and their
    launcher has ended the rest."""
    return ago_s < _LONGEST_ECHO_S and may_be_gone(evidence.picture, ago_s)


def _has_own_end(rank: RankState) -> bool:
    if _ago(rank) is None or is_done(rank) or (rank.failure and is_lost_peer(rank.failure)):
        return False
    return not ended_on_request(rank)


def _not_ended_by_launcher(ranks: list[RankState]) -> list[RankState]:
    """A launcher that says how ranks ended says nothing of those that it ended itself, when one was gone."""
    if all(rank.exit is None for rank in ranks):
        return ranks
    return [rank for rank in ranks if rank.exit is not None or rank.failure or rank.memory]


def _ago(rank: RankState) -> float | None:
    """How long ago it ended or failed; None: it did not."""
    if has_ended(rank):
        # It may have told its failure some time before it was gone.
        return max(rank.state_s if rank.state in "XZ" else 0.0, rank.age_s if rank.failure else 0.0)
    return rank.age_s if rank.failure or rank.phase is Phase.FAILED else None


def _strength(rank: RankState) -> int:
    """How sure it is that this one was not dragged along."""
    if rank.memory or (rank.exit is not None and rank.exit < 0) or rank.failure:
        return 3
    # A process that is gone without a word; then one with an exit code that says little.
    return 2 if rank.exit is None else 1


def _first(ranks: list[RankState]) -> RankState:
    longest = max(_ago(rank) or 0.0 for rank in ranks)
    early = [rank for rank in ranks if (_ago(rank) or 0.0) >= longest - _AT_ONCE_S]
    return max(early, key=lambda rank: (_strength(rank), _ago(rank) or 0.0, -rank.rank))


def _theirs(ranks: list[RankState]) -> str:
    if all(rank.exit is not None and rank.exit < 0 for rank in ranks):
        return "a signal"
    return "itself" if len(ranks) == 1 else "themselves"


def _diagnosis(evidence: Evidence, rank: RankState, also: str) -> Diagnosis:
    cause, how, next_step = _how(evidence, rank)
    return evidence.about(
        rank,
        cause,
        what=f"{name(rank)} {how}{also}{_rest(evidence, rank)}",
        next_step=next_step,
        is_certain=True,
        since_s=_ago(rank) or 0.0,
    )


def _how(evidence: Evidence, rank: RankState) -> tuple[Cause, str, str]:
    where = at(evidence, rank)
    number = None if rank.exit is None or rank.exit >= 0 else -rank.exit
    if rank.memory:
        return (
            Cause.OUT_OF_MEMORY,
            f"was killed for want of memory{where} ({rank.memory})",
            "raise the memory limit, or lower the batch size or the number of DataLoader workers",
        )
    if rank.failure:
        return Cause.EXCEPTION, f"failed{where}: {rank.failure}", _after_failure(rank)
    if number is not None:
        return Cause.KILLED, f"was killed by {signal_name(number)}{where}", _after_signal(rank, number)
    if rank.exit is not None:
        return Cause.EXCEPTION, f"ended with exit code {rank.exit}{where}", _after_failure(rank)
    return (
        Cause.KILLED,
        f"is gone{where}: it ended without a word, and by what nobody saw",
        f"look at the end of its log and at the kernel's log on {rank.host} (dmesg)",
    )


def _after_signal(rank: RankState, number: int) -> str:
    if number == signal.SIGABRT:
        return "look at the end of its log: a library gave up, as gloo does when ranks enter different collectives"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return "look at the end of its log: a library broke in it (a full /dev/shm gives SIGBUS)"
    return f"find who sent it: an operator, a batch system, or the kernel for want of memory (dmesg on {rank.host})"


def _after_failure(rank: RankState) -> str:
    text = rank.failure.lower()
    if any(sign in text for sign in ("no space left", "disk is full", "disk quota")):
        return "make room on that file system; the run then goes on from its newest whole checkpoint"
    if "out of memory" in text:
        return "lower the batch size, or accumulate over more micro-batches"
    if "dataloader worker" in text:
        return "look at the kernel's log (dmesg) for what ended the worker: often it is want of memory"
    return "see its traceback at the end of its log"


def _rest(evidence: Evidence, first: RankState) -> str:
    """Who fell with it, or waits for it still."""
    dragged = [rank for rank in evidence.ranks if rank is not first and is_lost_peer(rank.failure)]
    if dragged:
        return f"; {count(len(dragged), 'rank')} lost the connection to it"
    stopped = [rank for rank in evidence.ranks if rank.state == "T"]
    return f"; {names(stopped)} is stopped by a signal besides" if stopped else ""


def _torn_by_mismatch(evidence: Evidence, first: RankState, own: list[RankState]) -> Diagnosis | None:
    """Gloo ends a process by SIGABRT when more arrives than it expects: ranks had entered different collectives. Its
    words are in the rank's log alone, so this is told by where it was."""
    aborted = [rank for rank in own if rank.exit == -signal.SIGABRT or is_mismatch(rank.failure)]
    was_meeting = is_meeting(first.stack) or (
        not first.stack and first.phase in (Phase.BACKWARD, Phase.BETWEEN)
    )
    if not aborted or not (was_meeting or is_mismatch(first.failure)):
        return None
    whole = [rank for rank in evidence.picture.ranks if rank not in aborted]
    # Who received more than expected ends; when that is most of them, the one who sent it is left.
    odd = whole if 0 < len(whole) < len(aborted) else aborted
    place = f" ({innermost(odd[0].stack)})" if odd[0].stack else ""
    ops = [
        (who, op)
        for who, ranks in ((names(odd), odd), ("the others", _but(evidence, odd)))
        if (op := _entered(ranks))
    ]
    entered = "".join(f"{who}: {op}; " for who, op in ops)
    return evidence.about(
        odd[0],
        Cause.MISMATCH,
        what=f"{names(odd)} entered another collective than the others, or one of another size{at(evidence, odd[0])}"
        f"{place}: {entered}{names(aborted)} {'was' if len(aborted) == 1 else 'were'} ended by SIGABRT in it, "
        "as gloo does when more data comes than it expects",
        next_step="make every rank call the same collectives in the same order with the same shapes; "
        f"the log of rank {aborted[0].rank} has the sizes in bytes",
        is_certain=True,
        since_s=_ago(first) or 0.0,
    )


def _but(evidence: Evidence, ranks: list[RankState]) -> list[RankState]:
    return [rank for rank in evidence.picture.ranks if rank not in ranks]


def _entered(ranks: list[RankState]) -> str:
    """What the first of them of which that is known was in when it ended: by its flight recorder, else by its stack."""
    for rank in ranks:
        if rank.collectives:
            return collective(pending(rank) or rank.collectives[-1], with_sizes=True)
    return next((op for rank in ranks if (op := operation(rank.stack))), "")
