"""Processes that do not run: stopped by a signal, held by a debugger, or waiting for storage in the kernel."""

from __future__ import annotations

from drumline.watch.cluster_state import RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import Evidence, has_ended
from drumline.watch.diagnosis.phrases import DOING, name, names, seconds, since, who_waits
from drumline.watch.diagnosis.stack_frames import innermost, is_at_prompt

CERTAINLY_STOPPED_S = 1.0
"""Tools that pause a process by signals (cpulimit, a snapshot) let it continue within a fraction of this; debuggers and
profilers hold it by ptrace, which is another state."""


def judge_stopped(evidence: Evidence) -> Diagnosis | None:
    """A rank in state T. Its beat stands where it was when the signal came. Where all of them are, somebody has stopped
    the whole job, and may let it go on."""
    stopped = [rank for rank in evidence.ranks if rank.state == "T"]
    if not stopped:
        return None
    first = max(stopped, key=lambda rank: (rank.state_s, -rank.rank))
    pids = " ".join(str(rank.pid) for rank in stopped if rank.host == first.host)
    others = [rank for rank in stopped if rank is not first]
    is_whole = all(rank.state == "T" or has_ended(rank) for rank in evidence.picture.ranks)
    too = f"; so {'is' if len(others) == 1 else 'are'} {names(others)}" if others else ""
    return evidence.about(
        first,
        Cause.STOPPED,
        what=f"{name(first)} is stopped by a signal, in {DOING[first.phase]} {since(evidence, first)}"
        f"{too}{who_waits(evidence, stopped)}",
        next_step=f"find who stopped it; until the job is ended, kill -CONT {pids} on {first.host} lets it go on",
        is_certain=first.state_s >= CERTAINLY_STOPPED_S and not is_whole,
        since_s=first.state_s,
    )


def judge_debugged(evidence: Evidence) -> Diagnosis | None:
    """A rank in state t, or at a breakpoint: somebody looks at it, and knows."""
    held = [rank for rank in evidence.ranks if rank.state == "t" or is_at_prompt(rank.stack)]
    if not held:
        return None
    first = max(held, key=lambda rank: (rank.state_s, -rank.rank))
    return evidence.about(
        first,
        Cause.DEBUGGED,
        what=f"{name(first)} is held by {first.tracer or 'a debugger'}, in {DOING[first.phase]} "
        f"{since(evidence, first)}{who_waits(evidence, held)}",
        next_step=f"let process {first.pid} on {first.host} go on there, or detach",
        since_s=first.state_s,
    )


def judge_storage(evidence: Evidence, rank: RankState) -> Diagnosis | None:
    """A rank in state D that moves no data: the kernel waits for a file system that does not answer."""
    if rank.state != "D" or rank.has_io:
        return None
    place = f" ({innermost(rank.stack)})" if rank.stack else ""
    return evidence.about(
        rank,
        Cause.STORAGE,
        what=f"{name(rank)} waits for storage that does not answer, in {DOING[rank.phase]} {since(evidence, rank)}"
        f"{place}: in the kernel (state D) for {seconds(rank.state_s)} without a byte read or written"
        f"{who_waits(evidence, [rank])}",
        next_step=f"look at the file systems of {rank.host} (df, dmesg: a network mount whose server is away); "
        "a process in state D cannot be ended before storage answers",
    )
