"""The cluster's state as evidence for a diagnosis: which ranks are blocked in which collective,
which are behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from drumline.base.text import duration, plural
from drumline.watch.cluster_state import ClusterState, Collective, RankState, WorkerState
from drumline.watch.diagnosis.diagnosis import PHASES, Cause, Diagnosis, collective_name
from drumline.watch.diagnosis.stack_frames import is_in_collective, is_loading
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase

# over a second or two; on a crowded machine a process that computes may get less: `is_starved`
BUSY_CORES = 0.1
OUT_OF_LOOP = (Phase.LEAVING, Phase.LEFT)
_ORDERLY_EXITS = (0, 75)  # done, or preempted after a save

# The order within a step: the count of micro-batches increases before a forward pass, so data comes
# after backward. Ranks that evaluate or save are not compared.
_ORDER = {
    Phase.BETWEEN: 0,
    Phase.FORWARD: 1,
    Phase.USER: 1,
    Phase.BACKWARD: 2,
    Phase.OPTIMIZER: 3,
    Phase.DATA: 4,
    Phase.COMPILE: 1,
    Phase.COMPILED: 2,
}


@dataclass(frozen=True)
class Evidence:
    """`ranks` are those of nodes that send heartbeats; the last state of the others is only in
    `cluster`."""

    cluster: ClusterState

    @cached_property
    def ranks(self) -> list[RankState]:
        """In order."""
        lost = {node.node for node in self.cluster.lost}
        here = (node for node in self.cluster.nodes if node.node not in lost)
        return sorted((rank for node in here for rank in node.ranks), key=lambda rank: rank.rank)

    @cached_property
    def in_loop(self) -> list[RankState]:
        """The ranks that run, and have neither left the loop nor failed."""
        out = (*OUT_OF_LOOP, Phase.FAILED)
        return [rank for rank in self.ranks if not has_exited(rank) and rank.phase not in out]

    @cached_property
    def has_steps(self) -> bool:
        """Whether steps are counted: in a plain script they are not."""
        return any(rank.step for rank in self.cluster.ranks)

    @cached_property
    def blocked(self) -> dict[int, Collective | None]:
        """By rank: the collective in which it waits for others; None if only its stack or phase
        shows that."""
        behind = {rank.rank for rank in self.behind}
        return {
            rank.rank: pending(rank)
            for rank in self.in_loop
            if rank.rank not in behind and is_blocked(rank)
        }

    @cached_property
    def behind(self) -> list[RankState]:
        """The ranks that did not enter the collective that others are in; without records, those in
        earlier phases."""
        entered = filter(None, map(pending, self.in_loop))
        waits = Counter((collective.group, collective.number) for collective in entered)
        if not waits:
            return self._behind_by_phase()

        group, number = max(waits, key=lambda key: (waits[key], key[1]))
        outside = [rank for rank in self.in_loop if not pending(rank)]
        late = [rank for rank in outside if not _has_reached(rank, group, number)]
        return [rank for rank in late if rank.collectives or not is_blocked(rank)]

    def _behind_by_phase(self) -> list[RankState]:
        """The ranks in an earlier phase or step than the furthest, or with fewer collectives."""
        points = {
            rank.rank: (rank.step, rank.micro, _ORDER[rank.phase])
            for rank in self.in_loop
            if rank.phase in _ORDER
        }

        furthest = max(points.values(), default=None)
        late = [rank for rank in self.in_loop if points.get(rank.rank, furthest) != furthest]
        if late:
            return late

        newest = max((rank.collective for rank in self.in_loop), default=0)
        return [rank for rank in self.in_loop if rank.collective < newest]

    def diagnosis(
        self,
        rank: RankState,
        cause: Cause,
        what: str,
        next_step: str,
        *,
        is_certain: bool = False,
        since_s: float | None = None,
    ) -> Diagnosis:
        """About one rank. `since_s` defaults to its last progress."""
        return Diagnosis(
            cause=cause,
            host=rank.host,
            rank=rank.rank,
            step=rank.step if self.has_steps else None,
            what=what,
            next_step=next_step,
            is_certain=is_certain,
            since_s=rank.still_s if since_s is None else since_s,
            num_blocked=len(self.blocked.keys() - {rank.rank}),
            is_ranks_error=cause is Cause.EXCEPTION and bool(rank.failure),
        )

    def since(self, rank: RankState) -> str:
        """`since step 812`; if no steps are counted, `for 12 s`."""
        if self.has_steps:
            return f"since step {rank.step}"
        return f"for {duration(rank.still_s)}"

    def where(self, rank: RankState, phase: Phase | None = None) -> str:
        """`in forward since step 812`. `phase` defaults to the rank's own."""
        return f"{PHASES[rank.phase if phase is None else phase]} {self.since(rank)}"

    def place(self, rank: RankState) -> str:
        """` at step 812, in forward`, as far as known."""
        parts = [f"at step {rank.step}"] if self.has_steps else []
        if rank.phase not in (Phase.FAILED, Phase.LEFT, Phase.LEAVING, Phase.START):
            parts.append(PHASES[rank.phase])

        return f" {', '.join(parts)}" if parts else ""

    def blocked_ranks(self, causes: Sequence[RankState] = ()) -> str:
        """`; 7 ranks are blocked in all_reduce #4410`, or nothing. Not counting `causes`."""
        named = {rank.rank for rank in causes}
        blocked = [collective for rank, collective in self.blocked.items() if rank not in named]
        if not blocked:
            return ""

        verb = "is" if len(blocked) == 1 else "are"
        ranks_are = f"; {plural(len(blocked), 'rank')} {verb}"
        counts = Counter(map(collective_name, filter(None, blocked)))
        if not counts:
            return f"{ranks_are} waiting for it"

        places = [place for place, _ in counts.most_common(2)]
        if len(counts) > 2:
            places.append("others")
        return f"{ranks_are} blocked in {' and '.join(places)}"


def _has_reached(rank: RankState, group: str, number: int) -> bool:
    """Whether it has entered this collective of the group, or a later one."""
    return any(
        collective.group == group and collective.number >= number for collective in rank.collectives
    )


def has_exited(rank: RankState) -> bool:
    """Whether its process has ended."""
    return rank.state in ("X", "Z") or rank.exit is not None


def has_ended(rank: RankState) -> bool:
    """Whether it has exited, or has reported its last error."""
    return has_exited(rank) or bool(rank.failure) or rank.phase is Phase.FAILED


def is_done(rank: RankState) -> bool:
    """Whether it has left the loop without an error."""
    if rank.exit is None:
        return rank.phase in OUT_OF_LOOP
    return rank.exit in _ORDERLY_EXITS


def has_left(rank: RankState) -> bool:
    """Whether it is out of its loop, and no diagnosis of it will come: it has no error, or the user
    has interrupted it."""
    return rank.phase is Phase.LEFT or rank.failure_kind is FailureKind.INTERRUPTED


def computes(process: RankState | WorkerState) -> bool:
    """Whether it uses the CPU, or would if the machine were less crowded."""
    return process.cpu >= BUSY_CORES or process.is_starved


def is_busy(rank: RankState) -> bool:
    """Whether it works: it computes, or reads or writes files."""
    return computes(rank) or rank.has_io


def cores_used(process: RankState | WorkerState) -> str:
    """`1.8 cores`; where it gets hardly any, why."""
    if process.cpu >= BUSY_CORES:
        return f"{process.cpu:.1f} cores"
    return f"{process.cpu:.2f} cores, waiting for a CPU of a crowded machine"


def pending(rank: RankState) -> Collective | None:
    """The oldest collective that it entered and that is not done."""
    for collective in rank.collectives:
        if not collective.is_done:
            return collective
    return None


def is_blocked(rank: RankState) -> bool:
    """Whether it waits in a collective: by its flight recorder, otherwise by its stack, otherwise
    by its phase."""
    if pending(rank) is not None:
        return True
    if rank.answers is False or rank.state in "TtD":
        return False
    if rank.phase is Phase.COMPILED:
        return True

    if rank.stack:
        is_in_data = rank.phase is Phase.DATA or is_loading(rank.stack)
        return is_in_collective(rank.stack) and not is_in_data
    return rank.phase is Phase.BACKWARD and not computes(rank)
