"""Ranks that are alive, and that others wait for: in the dataset, in user code, in C with Python's lock, at work."""

from __future__ import annotations

from drumline.watch.cluster_state import RankState, WorkerState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import BUSY_CORES, Evidence, is_busy, pending
from drumline.watch.diagnosis.phrases import DOING, collective, count, name, names, since, who_waits
from drumline.watch.diagnosis.stack_frames import innermost, is_idle_worker, is_loading, users_frame
from drumline.watch.diagnosis.stopped import judge_storage
from drumline.watch.heartbeat import Phase

# Why a worker does not deliver, the surest sign first.
_STATES = {
    "T": (Cause.STOPPED, "is stopped by a signal"),
    "X": (Cause.DATASET, "is gone"),
    "Z": (Cause.DATASET, "is gone"),
    "t": (Cause.DEBUGGED, "is held by a debugger"),
    "D": (Cause.STORAGE, "waits for storage"),
}
_FORK_S = 30.0
"""Nothing that ends sleeps so long in there; before that it may be a hook of the user's (os.register_at_fork)."""
_FORK_NEXT = (
    "use Python 3.12 or newer (in 3.11 a thread of torch can block a fork), or ddp.loader, which forks such a worker "
    "again; gdb -p {} on {} shows what it waits for"
)
_MOST_PLACES = 4
_SEE_WAIT = "see what {} waits for: a file, a server, a lock; the diagnosis file has its stack"


def judge_standing(evidence: Evidence) -> Diagnosis | None:
    """The rank that all the others wait for, by what it does instead."""
    suspects = find_suspects(evidence)
    if not suspects:
        return None
    rank = suspects[0]
    if diagnosis := judge_storage(evidence, rank):
        return diagnosis
    loads = rank.phase is Phase.DATA or is_loading(rank.stack)
    # In data only where the innermost call is the user's own: one that waits for a worker may just be late to answer.
    if rank.answers is False and (not loads or users_frame(rank.stack[:1])):
        return _holds_gil(evidence, rank, suspects)
    if loads:
        return _in_data(evidence, rank, suspects)
    if is_busy(rank):
        return _works(evidence, rank, suspects)
    if users_frame(rank.stack) or rank.phase in (Phase.FORWARD, Phase.OPTIMIZER, Phase.USER):
        return _in_user_code(evidence, rank, suspects)
    return _never_entered(evidence, rank, suspects)


def find_suspects(evidence: Evidence) -> list[RankState]:
    """Those whom others wait for, the likeliest first; when nobody waits, all that stand."""
    idle = [rank for rank in evidence.in_loop if rank.rank not in evidence.waiting]
    suspects = evidence.behind or idle
    return sorted(suspects, key=lambda rank: (-_weight(rank), -rank.still_s, rank.rank))


def judge_unknown(evidence: Evidence) -> Diagnosis | None:
    """Everybody waits for somebody: what each is in."""
    ranks = evidence.in_loop
    if not ranks:
        return None
    first = max(ranks, key=lambda rank: (rank.still_s, -rank.rank))
    places: dict[str, list[RankState]] = {}
    for rank in ranks:
        one = pending(rank)
        doing = collective(one, with_sizes=True) if one else innermost(rank.stack) or DOING[rank.phase]
        places.setdefault(doing, []).append(rank)
    most = sorted(places.items(), key=lambda place: -len(place[1]))
    shown = "; ".join(f"{names(who)} in {where}" for where, who in most[:_MOST_PLACES])
    if rest := most[_MOST_PLACES:]:
        shown += f"; {count(sum(len(who) for _, who in rest), 'rank')} elsewhere"
    return Diagnosis(
        cause=Cause.UNKNOWN,
        host=first.host,
        rank=None if len(ranks) > 1 else first.rank,
        step=first.step if evidence.has_steps else None,
        what=f"nothing has moved {since(evidence, first)}, and no rank stands out: {shown}",
        next_step="read the stacks in the diagnosis file; where all are in one collective, try the network with "
        "drumline doctor",
        is_certain=False,
        since_s=min(rank.still_s for rank in ranks),
        num_blocked=len(evidence.waiting),
    )


def _weight(rank: RankState) -> int:
    signs = (rank.state == "D" and not rank.has_io, any(worker.state == "T" for worker in rank.workers))
    return 2 * any(signs) + (rank.answers is False)


def _in_data(evidence: Evidence, rank: RankState, suspects: list[RankState]) -> Diagnosis:
    worker = _worst(rank)
    cause, why, next_step = Cause.DATASET, "", ""
    if worker is None:
        frame = users_frame(rank.stack)
        held = "with Python's lock held" if rank.answers is False else ""
        why = f" ({', '.join(filter(None, (frame, held)))})" if frame or held else ""
        next_step = _SEE_WAIT.format(frame or "its dataset")
    else:
        cause, why, next_step = _about_worker(rank, worker)
    return _diagnosis(
        evidence,
        rank,
        cause,
        f"{name(rank)} has been in DataLoader {since(evidence, rank)}{why}",
        suspects,
        next_step,
        is_certain=worker is not None and (worker.state in "TXZ" or worker.in_fork_s > _FORK_S),
    )


def _worst(rank: RankState) -> WorkerState | None:
    """The worker that holds up the batch."""
    for state in _STATES:
        for worker in rank.workers:
            if worker.state == state:
                return worker
    if in_fork := [worker for worker in rank.workers if worker.in_fork_s]:
        return in_fork[0]
    at_work = [worker for worker in rank.workers if worker.stack and not is_idle_worker(worker.stack)]
    return max(at_work, key=lambda worker: (-worker.cpu, -worker.number), default=None)


def _about_worker(rank: RankState, worker: WorkerState) -> tuple[Cause, str, str]:
    cause, how = _STATES.get(worker.state, (Cause.DATASET, ""))
    frame = innermost(worker.stack)
    if worker.in_fork_s and not how:
        return cause, f" (worker {worker.number} is stuck in fork)", _FORK_NEXT.format(worker.pid, rank.host)
    if not how:
        how = f"computes with {worker.cpu:.1f} cores" if worker.cpu >= BUSY_CORES else "is"
    how = f"{how} in {frame}" if frame else how
    next_steps = {
        Cause.STOPPED: f"find who stopped it; until the job is ended, kill -CONT {worker.pid} on {rank.host} "
        "lets it go on",
        Cause.DEBUGGED: f"let process {worker.pid} on {rank.host} go on, or detach",
        Cause.STORAGE: f"look at the file systems of {rank.host} (df, dmesg)",
    }
    gone = f"look at the kernel's log on {rank.host} for what ended process {worker.pid} (dmesg)"
    waits = _SEE_WAIT.format(frame or "the dataset")
    next_step = next_steps.get(cause, gone if worker.state in "XZ" else waits)
    return cause, f" (worker {worker.number} {how})", next_step


def _holds_gil(evidence: Evidence, rank: RankState, suspects: list[RankState]) -> Diagnosis:
    frame = innermost(rank.stack)
    where = f" in {frame}" if frame else ""
    burns = f", at {rank.cpu:.1f} cores" if rank.cpu >= BUSY_CORES else ""
    return _diagnosis(
        evidence,
        rank,
        Cause.GIL,
        f"{name(rank)} holds Python's lock (GIL){where}, in {DOING[rank.phase]} {since(evidence, rank)}{burns}: "
        "a call into C does not return",
        suspects,
        f"see what {frame or 'that call'} calls; a C extension should release the lock before it waits",
    )


def _works(evidence: Evidence, rank: RankState, suspects: list[RankState]) -> Diagnosis:
    frame = innermost(rank.stack)
    sign = f"{rank.cpu:.1f} cores" if rank.cpu >= BUSY_CORES else "files are read or written"
    return _diagnosis(
        evidence,
        rank,
        Cause.SLOW,
        f"{name(rank)} is slow but alive: in {DOING[rank.phase]} {since(evidence, rank)} "
        f"({sign}{f', in {frame}' if frame else ''})",
        suspects,
        "wait, or raise watch.hang_s if it often takes so long; the diagnosis file has its stack",
    )


def _in_user_code(evidence: Evidence, rank: RankState, suspects: list[RankState]) -> Diagnosis:
    frame = innermost(rank.stack)
    phase = Phase.USER if rank.phase is Phase.START else rank.phase
    return _diagnosis(
        evidence,
        rank,
        Cause.USER_CODE,
        f"{name(rank)} has been in {DOING[phase]} {since(evidence, rank)}{f' ({frame})' if frame else ''}, without "
        "using the CPU",
        suspects,
        f"see what {frame or 'it'} waits for; the diagnosis file has its stack",
    )


def _never_entered(evidence: Evidence, rank: RankState, suspects: list[RankState]) -> Diagnosis | None:
    missed = next((one for one in evidence.waiting.values() if one is not None), None)
    if missed is None:
        return None
    where = f"{innermost(rank.stack)}, in {DOING[rank.phase]}" if rank.stack else DOING[rank.phase]
    return _diagnosis(
        evidence,
        rank,
        Cause.NOT_ENTERED,
        f"{name(rank)} never entered {collective(missed, with_sizes=True)}: it has been in {where} "
        f"{since(evidence, rank)}",
        suspects,
        "see why it is there and not in that collective: often an `if` that differs between ranks; the diagnosis file "
        "has all stacks",
    )


def _diagnosis(
    evidence: Evidence,
    rank: RankState,
    cause: Cause,
    what: str,
    suspects: list[RankState],
    next_step: str,
    *,
    is_certain: bool = False,
) -> Diagnosis:
    same = [one for one in suspects if one is not rank and one.phase is rank.phase]
    too = f"; {names(same)} too" if same else ""
    return evidence.about(
        rank,
        cause,
        what=f"{what}{too}{who_waits(evidence, suspects)}",
        next_step=next_step,
        is_certain=is_certain,
    )
