"""Ranks that are alive and block the others: stopped, debugged, waiting for storage, in the
dataset, in user code, in a C call that holds the GIL, or computing."""

from __future__ import annotations

from dataclasses import replace

from drumline.base.text import duration, plural
from drumline.watch.cluster_state import RankState, WorkerState
from drumline.watch.diagnosis.diagnosis import (
    PHASES,
    Cause,
    Diagnosis,
    collective_name,
    name,
    names,
)
from drumline.watch.diagnosis.evidence import (
    Evidence,
    computes,
    cores_used,
    has_exited,
    is_busy,
    pending,
)
from drumline.watch.diagnosis.stack_frames import (
    innermost,
    is_at_breakpoint,
    is_idle_worker,
    is_loading,
    users_frame,
)
from drumline.watch.heartbeat import Phase

CERTAINLY_STOPPED_S = 1.0
"""Tools that pause a process by signals (cpulimit, a snapshot) continue it much sooner; debuggers
and profilers use ptrace, which is a different state."""
_FORK_S = 30.0
"""No healthy process sleeps this long in fork; a shorter sleep may be a user's hook
(os.register_at_fork)."""
_MAX_PLACES = 4
_STACK = "its stack is in the diagnosis file"
# With {0}: the process, {1}: its host.
_CONTINUE_IT = "find out who stopped it; kill -CONT {0} on {1} resumes it, if it still runs"
_LEAVE_DEBUGGER = "continue process {0} on {1} in the debugger, or detach"
_STUCK_IN_FORK = (
    "use Python 3.12 or newer (in 3.11 a thread of torch can block a fork), or ddp.loader, which forks such a worker "
    "again; gdb -p {0} on {1} shows what it waits for"
)
_CHECK_WAIT = f"check what {{}} waits for: a file, a server, a lock; {_STACK}"
_CHECK_KERNEL = "check the kernel log on {1} (dmesg) for what killed process {0}"
# Why a worker delivers no batch, the most certain state first.
_WORKER_STATES = {
    "T": (Cause.STOPPED, "is stopped by a signal", _CONTINUE_IT),
    "X": (Cause.DATASET, "has exited", _CHECK_KERNEL),
    "Z": (Cause.DATASET, "has exited", _CHECK_KERNEL),
    "t": (Cause.DEBUGGED, "is being debugged", _LEAVE_DEBUGGER),
    "D": (Cause.STORAGE, "waits for storage", "check the file systems of {1} (df, dmesg)"),
}


def find_stopped(evidence: Evidence) -> Diagnosis | None:
    """A rank in state T. If all of them are, somebody has stopped the whole job, and may continue
    it."""
    stopped = [rank for rank in evidence.ranks if rank.state == "T"]
    if not stopped:
        return None
    first = max(stopped, key=lambda rank: (rank.state_s, -rank.rank))
    others = [rank for rank in stopped if rank is not first]
    too = f"; so {'is' if len(others) == 1 else 'are'} {names(others)}" if others else ""
    what = f"{name(first)} is stopped by a signal, {evidence.where(first)}{too}{evidence.blocked_ranks(stopped)}"
    pids = " ".join(str(rank.pid) for rank in stopped if rank.host == first.host)
    is_whole_job = all(rank.state == "T" or has_exited(rank) for rank in evidence.cluster.ranks)
    is_certain = first.state_s >= CERTAINLY_STOPPED_S and not is_whole_job
    next_step = _CONTINUE_IT.format(pids, first.host)
    return evidence.diagnosis(
        first, Cause.STOPPED, what, next_step, is_certain=is_certain, since_s=first.state_s
    )


def find_debugged(evidence: Evidence) -> Diagnosis | None:
    """A rank in state t, or at a breakpoint."""
    held = [rank for rank in evidence.ranks if rank.state == "t" or is_at_breakpoint(rank.stack)]
    if not held:
        return None
    first = max(held, key=lambda rank: (rank.state_s, -rank.rank))
    by = first.tracer or "a debugger"
    what = f"{name(first)} is held by {by}, {evidence.where(first)}{evidence.blocked_ranks(held)}"
    next_step = _LEAVE_DEBUGGER.format(first.pid, first.host)
    return evidence.diagnosis(first, Cause.DEBUGGED, what, next_step, since_s=first.state_s)


def find_blocked(evidence: Evidence) -> Diagnosis | None:
    """The rank that all others wait for, and what it does instead. If none waits: any rank without
    progress."""
    idle = [rank for rank in evidence.in_loop if rank.rank not in evidence.blocked]
    suspects = sorted(
        evidence.behind or idle, key=lambda rank: (-_weight(rank), -rank.still_s, rank.rank)
    )
    if not suspects:
        return None
    rank = suspects[0]
    is_certain = False
    frame = innermost(rank.stack)
    loads = rank.phase is Phase.DATA or is_loading(rank.stack)
    if rank.state == "D" and not rank.has_io:
        suspects = [rank]
        cause = Cause.STORAGE
        what = (
            f"waits for storage that does not answer, {evidence.where(rank)}{f' ({frame})' if frame else ''}: in the "
            f"kernel (state D) for {duration(rank.state_s)} without reading or writing a byte"
        )
        next_step = (
            f"check the file systems of {rank.host} (df, dmesg: a network mount whose server is down); a process in "
            "state D cannot be killed before its storage answers"
        )
    elif rank.phase is Phase.COMPILE:
        at = f", at step {rank.step}" if evidence.has_steps else ""
        cause = Cause.COMPILING
        what = f"has been {PHASES[rank.phase]} for {duration(rank.still_s)}{at}"
        next_step = "wait: a large model may take minutes; TORCH_LOGS=dynamo,inductor shows what torch compiles"
    # In data only if the innermost call is the user's own: a rank that waits for a worker may only
    # answer late.
    elif rank.answers is False and (not loads or users_frame(rank.stack[:1])):
        cause = Cause.GIL
        place = f" at {frame}" if frame else ""
        cores = f", using {cores_used(rank)}" if computes(rank) else ""
        what = f"holds the GIL{place}, {evidence.where(rank)}{cores}: a call into C does not return"
        next_step = f"check what {frame or 'it'} calls; a C extension should release the GIL before it blocks"
    elif loads:
        worker = _worst_worker(rank)
        is_certain = worker is not None and (worker.state in "TXZ" or worker.in_fork_s > _FORK_S)
        cause, what, next_step = _loads_data(evidence, rank, worker)
    elif (found := _runs_other_code(evidence, rank)) is not None:
        cause, what, next_step = found
    else:
        return None
    same = [one for one in suspects if one is not rank and one.phase is rank.phase]
    too = f"; {names(same)} too" if same else ""
    what = f"{name(rank)} {what}{too}{evidence.blocked_ranks(suspects)}"
    return evidence.diagnosis(rank, cause, what, next_step, is_certain=is_certain)


def find_unknown(evidence: Evidence) -> Diagnosis | None:
    """Every rank waits: report where each is."""
    ranks = evidence.in_loop
    if not ranks:
        return None
    places: dict[str, list[RankState]] = {}
    for rank in ranks:
        one = pending(rank)
        frame = innermost(rank.stack)
        place = (
            f"in {collective_name(one, with_sizes=True)}"
            if one
            else f"at {frame}"
            if frame
            else PHASES[rank.phase]
        )
        places.setdefault(place, []).append(rank)
    most = sorted(places.items(), key=lambda place: -len(place[1]))
    shown = "; ".join(f"{names(who)} {where}" for where, who in most[:_MAX_PLACES])
    if rest := most[_MAX_PLACES:]:
        shown += f"; {plural(sum(len(who) for _, who in rest), 'rank')} elsewhere"
    first = max(ranks, key=lambda rank: (rank.still_s, -rank.rank))
    what = f"no progress {evidence.since(first)}, and no rank stands out: {shown}"
    next_step = "read the stacks in the diagnosis file; if all are in one collective, test the network: drumline doctor"
    since_s = min(rank.still_s for rank in ranks)
    found = evidence.diagnosis(first, Cause.UNKNOWN, what, next_step, since_s=since_s)
    number = None if len(ranks) > 1 else first.rank
    return replace(found, rank=number, num_blocked=len(evidence.blocked))


def _weight(rank: RankState) -> int:
    is_sure = (rank.state == "D" and not rank.has_io) or any(
        worker.state == "T" for worker in rank.workers
    )
    return 2 * is_sure + (rank.answers is False)


def _loads_data(
    evidence: Evidence, rank: RankState, worker: WorkerState | None
) -> tuple[Cause, str, str]:
    """The cause, the sentence after the rank's name, and what to do."""
    if worker is None:
        frame = users_frame(rank.stack)
        cause = Cause.DATASET
        next_step = _CHECK_WAIT.format(frame or "its dataset")
        why = ", ".join(filter(None, (frame, "holding the GIL" if rank.answers is False else "")))
    else:
        frame = innermost(worker.stack)
        cause, how, template = _WORKER_STATES.get(worker.state, (Cause.DATASET, "", _STUCK_IN_FORK))
        next_step = template.format(worker.pid, rank.host)
        if not how and worker.in_fork_s:
            how = "is stuck in fork"
            frame = ""
        elif not how:
            next_step = _CHECK_WAIT.format(frame)
            how = f"computes with {cores_used(worker)}" if computes(worker) else "is blocked"
        why = f"worker {worker.number} {how}{f' at {frame}' if frame else ''}"
    return (
        cause,
        f"has been {evidence.where(rank, Phase.DATA)}{f' ({why})' if why else ''}",
        next_step,
    )


def _worst_worker(rank: RankState) -> WorkerState | None:
    for state in _WORKER_STATES:
        for worker in rank.workers:
            if worker.state == state:
                return worker
    if in_fork := [worker for worker in rank.workers if worker.in_fork_s]:
        return in_fork[0]
    at_work = [
        worker for worker in rank.workers if worker.stack and not is_idle_worker(worker.stack)
    ]
    return max(at_work, key=lambda worker: (-worker.cpu, -worker.number), default=None)


def _runs_other_code(evidence: Evidence, rank: RankState) -> tuple[Cause, str, str] | None:
    """In user code, or in a library, instead of the collective that others are in."""
    frame = innermost(rank.stack)
    if is_busy(rank):
        work = cores_used(rank) if computes(rank) else "reading or writing files"
        what = (
            f"is slow but alive: {evidence.where(rank)} ({work}{f', at {frame}' if frame else ''})"
        )
        return Cause.SLOW, what, f"wait, or raise watch.hang_s if it often takes so long; {_STACK}"
    if users_frame(rank.stack) or rank.phase in (Phase.FORWARD, Phase.OPTIMIZER, Phase.USER):
        where = evidence.where(rank, Phase.USER if rank.phase is Phase.START else rank.phase)
        what = f"has been {where}{f' ({frame})' if frame else ''}, without using the CPU"
        return Cause.USER_CODE, what, f"check what {frame or 'it'} waits for; {_STACK}"
    missed = next((one for one in evidence.blocked.values() if one is not None), None)
    if missed is None:
        return None
    place = f"at {frame}, " if frame else ""
    what = f"did not enter {collective_name(missed, with_sizes=True)}: it has been {place}{evidence.where(rank)}"
    next_step = "check why it is not in that collective: often an `if` that differs across ranks; its stack is in "
    return Cause.NOT_ENTERED, what, f"{next_step}the diagnosis file"
