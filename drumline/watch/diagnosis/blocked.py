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
    Explanation,
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
    what = f"{name(first)} is stopped by a signal, {evidence.where(first)}"
    other_stopped = [rank for rank in stopped if rank is not first]
    if other_stopped:
        what += f"; so {'is' if len(other_stopped) == 1 else 'are'} {names(other_stopped)}"

    what += evidence.blocked_ranks(stopped)
    pids = " ".join(str(rank.pid) for rank in stopped if rank.host == first.host)
    is_whole_job = all(rank.state == "T" or has_exited(rank) for rank in evidence.cluster.ranks)
    is_certain = first.state_s >= CERTAINLY_STOPPED_S and not is_whole_job
    next_step = _CONTINUE_IT.format(pids, first.host)

    return evidence.diagnosis(
        first,
        Cause.STOPPED,
        what,
        next_step,
        is_certain=is_certain,
        since_s=first.state_s,
    )


def find_debugged(evidence: Evidence) -> Diagnosis | None:
    """A rank in state t, or at a breakpoint."""
    held = [rank for rank in evidence.ranks if rank.state == "t" or is_at_breakpoint(rank.stack)]
    if not held:
        return None

    first = max(held, key=lambda rank: (rank.state_s, -rank.rank))
    what = f"{name(first)} is held by a debugger, {evidence.where(first)}{evidence.blocked_ranks(held)}"
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
    if _waits_for_storage(rank):
        suspects = [rank]

    explanation = _explain(evidence, rank)
    if explanation is None:
        return None

    what = f"{name(rank)} {explanation.text}"
    in_same_phase = [peer for peer in suspects[1:] if peer.phase is rank.phase]
    if in_same_phase:
        what += f"; {names(in_same_phase)} too"

    what += evidence.blocked_ranks(suspects)

    return evidence.diagnosis(
        rank,
        explanation.cause,
        what,
        explanation.next_step,
        is_certain=explanation.is_certain,
    )


def _explain(evidence: Evidence, rank: RankState) -> Explanation | None:
    """What this rank does instead of the collective; None: it is unknown."""
    if _waits_for_storage(rank):
        return _storage_wait(evidence, rank)
    if rank.phase is Phase.COMPILE:
        return _compilation(evidence, rank)

    is_in_data = rank.phase is Phase.DATA or is_loading(rank.stack)

    # In data only if the innermost call is the user's own: a rank that waits for a worker may only
    # answer late.
    if rank.answers is False and (not is_in_data or users_frame(rank.stack[:1])):
        return _held_gil(evidence, rank)
    if is_in_data:
        return _data_loading(evidence, rank)

    return _code_outside_collectives(evidence, rank)


def find_unknown(evidence: Evidence) -> Diagnosis | None:
    """Every rank waits: report where each is."""
    ranks = evidence.in_loop
    if not ranks:
        return None

    ranks_by_place: dict[str, list[RankState]] = {}
    for rank in ranks:
        ranks_by_place.setdefault(_place(rank), []).append(rank)

    places = sorted(ranks_by_place, key=lambda place: -len(ranks_by_place[place]))
    shown = "; ".join(f"{names(ranks_by_place[place])} {place}" for place in places[:_MAX_PLACES])
    num_elsewhere = sum(len(ranks_by_place[place]) for place in places[_MAX_PLACES:])
    if num_elsewhere:
        shown += f"; {plural(num_elsewhere, 'rank')} elsewhere"

    first = max(ranks, key=lambda rank: (rank.still_s, -rank.rank))
    what = f"no progress {evidence.since(first)}, and no rank stands out: {shown}"
    next_step = "read the stacks in the diagnosis file; if all are in one collective, test the network: drumline doctor"
    since_s = min(rank.still_s for rank in ranks)
    diagnosis = evidence.diagnosis(first, Cause.UNKNOWN, what, next_step, since_s=since_s)
    number = None if len(ranks) > 1 else first.rank

    return replace(diagnosis, rank=number, num_blocked=len(evidence.blocked))


def _place(rank: RankState) -> str:
    """Where this rank is, for a list of places."""
    entered = pending(rank)
    if entered is not None:
        return f"in {collective_name(entered, with_sizes=True)}"

    frame = innermost(rank.stack)

    return f"at {frame}" if frame else PHASES[rank.phase]


def _weight(rank: RankState) -> int:
    """How certain it is that this rank blocks the others."""
    has_stopped_worker = any(worker.state == "T" for worker in rank.workers)
    is_sure = _waits_for_storage(rank) or has_stopped_worker
    return 2 * is_sure + (rank.answers is False)


def _waits_for_storage(rank: RankState) -> bool:
    """Whether it is in the kernel and reads or writes nothing."""
    return rank.state == "D" and not rank.has_io


def _storage_wait(evidence: Evidence, rank: RankState) -> Explanation:
    """It hangs in a system call, as on a network mount whose server is down."""
    text = (
        f"waits for storage that does not answer, {evidence.where(rank)}{_in_brackets(innermost(rank.stack))}: in the "
        f"kernel (state D) for {duration(rank.state_s)} without reading or writing a byte"
    )
    next_step = (
        f"check the file systems of {rank.host} (df, dmesg: a network mount whose server is down); a process in "
        "state D cannot be killed before its storage answers"
    )
    return Explanation(Cause.STORAGE, text, next_step)


def _compilation(evidence: Evidence, rank: RankState) -> Explanation:
    """torch's compiler is at work; all others wait for it."""
    at_step = f", at step {rank.step}" if evidence.has_steps else ""
    text = f"has been {PHASES[rank.phase]} for {duration(rank.still_s)}{at_step}"
    next_step = (
        "wait: a large model may take minutes; TORCH_LOGS=dynamo,inductor shows what torch compiles"
    )

    return Explanation(Cause.COMPILING, text, next_step)


def _held_gil(evidence: Evidence, rank: RankState) -> Explanation:
    """Its answering thread does not run: the main thread has not released the GIL."""
    frame = innermost(rank.stack)
    cores = f", using {cores_used(rank)}" if computes(rank) else ""
    text = (
        f"holds the GIL{_at(frame)}, {evidence.where(rank)}{cores}: a call into C does not return"
    )
    next_step = (
        f"check what {frame or 'it'} calls; a C extension should release the GIL before it blocks"
    )

    return Explanation(Cause.GIL, text, next_step)


def _data_loading(evidence: Evidence, rank: RankState) -> Explanation:
    """In the DataLoader: the worker that it waits for, or its own code."""
    worker = _worst_worker(rank)
    if worker is not None:
        explanation = _explain_worker(worker, rank.host)
    else:
        frame = users_frame(rank.stack)
        gil = "holding the GIL" if rank.answers is False else ""
        why = ", ".join(filter(None, (frame, gil)))
        next_step = _CHECK_WAIT.format(frame or "its dataset")
        explanation = Explanation(Cause.DATASET, why, next_step)

    text = f"has been {evidence.where(rank, Phase.DATA)}{_in_brackets(explanation.text)}"

    return replace(explanation, text=text)


def _explain_worker(worker: WorkerState, host: str) -> Explanation:
    """What the worker does instead of delivering its batch."""
    frame = innermost(worker.stack)
    cause = Cause.DATASET
    if worker.state in _WORKER_STATES:
        cause, state, template = _WORKER_STATES[worker.state]
        state += _at(frame)
        next_step = template.format(worker.pid, host)
    elif worker.in_fork_s:
        state = "is stuck in fork"
        next_step = _STUCK_IN_FORK.format(worker.pid, host)
    else:
        work = f"computes with {cores_used(worker)}" if computes(worker) else "is blocked"
        state = f"{work}{_at(frame)}"
        next_step = _CHECK_WAIT.format(frame)

    is_certain = worker.state in "TXZ" or worker.in_fork_s > _FORK_S

    return Explanation(cause, f"worker {worker.number} {state}", next_step, is_certain)


def _worst_worker(rank: RankState) -> WorkerState | None:
    """The worker that most likely holds up the batch: in the worst state, stuck in fork, or reading
    a sample."""
    for state in _WORKER_STATES:
        for worker in rank.workers:
            if worker.state == state:
                return worker

    for worker in rank.workers:
        if worker.in_fork_s:
            return worker

    at_work = [
        worker for worker in rank.workers if worker.stack and not is_idle_worker(worker.stack)
    ]

    return max(at_work, key=lambda worker: (-worker.cpu, -worker.number), default=None)


def _code_outside_collectives(evidence: Evidence, rank: RankState) -> Explanation | None:
    """In user code, or in a library, instead of the collective that others are in."""
    frame = innermost(rank.stack)
    if is_busy(rank):
        work = cores_used(rank) if computes(rank) else "reading or writing files"
        place = f", at {frame}" if frame else ""
        text = f"is slow but alive: {evidence.where(rank)} ({work}{place})"
        next_step = f"wait, or raise watch.hang_s if it often takes so long; {_STACK}"

        return Explanation(Cause.SLOW, text, next_step)

    if users_frame(rank.stack) or rank.phase in (Phase.FORWARD, Phase.OPTIMIZER, Phase.USER):
        where = evidence.where(rank, Phase.USER if rank.phase is Phase.START else rank.phase)
        text = f"has been {where}{_in_brackets(frame)}, without using the CPU"
        return Explanation(Cause.USER_CODE, text, f"check what {frame or 'it'} waits for; {_STACK}")

    missed = next(filter(None, evidence.blocked.values()), None)
    if missed is None:
        return None

    place = f"at {frame}, " if frame else ""
    text = f"did not enter {collective_name(missed, with_sizes=True)}: it has been {place}{evidence.where(rank)}"
    next_step = (
        f"check why it is not in that collective: often an `if` that differs across ranks; {_STACK}"
    )

    return Explanation(Cause.NOT_ENTERED, text, next_step)


def _at(frame: str) -> str:
    return f" at {frame}" if frame else ""


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
