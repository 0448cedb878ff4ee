"""A picture, read for the judge: who waits in which collective, and who is missing there.

What the flight recorders say counts most: a rank that never entered the collective that others are in is behind. Where
there are none, the beats tell: a rank that is behind the others in step or phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from drumline.watch.cluster_state import ClusterState, Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.stack_frames import is_loading, is_meeting
from drumline.watch.heartbeat import Phase

BUSY_CORES = 0.1
"""Over a second or two. Who computes gets at least that, also where many others do."""
GONE = ("X", "Z")
OUT = (Phase.LEAVING, Phase.LEFT)
"""Of the loop."""
ORDERLY_EXITS = (0, 75)
"""Done, or preempted after a save."""
# In the order of a step: the count of micro-batches goes up before a forward pass, so data is for the one after it. Who
# evaluates or saves is not compared.
_ORDER = {
    Phase.BETWEEN: 0,
    Phase.FORWARD: 1,
    Phase.USER: 1,
    Phase.BACKWARD: 2,
    Phase.OPTIMIZER: 3,
    Phase.DATA: 4,
}


@dataclass(frozen=True)
class Evidence:
    """`ranks` are those of nodes that are heard; what the others said last is in the picture only."""

    picture: ClusterState

    @cached_property
    def ranks(self) -> list[RankState]:
        silent = {one.node for one in self.picture.lost}
        found = (rank for node in self.picture.nodes if node.node not in silent for rank in node.ranks)
        return sorted(found, key=lambda rank: rank.rank)

    @cached_property
    def in_loop(self) -> list[RankState]:
        """Those who run, and neither left nor failed."""
        out = (*OUT, Phase.FAILED)
        return [rank for rank in self.ranks if not has_ended(rank) and rank.phase not in out]

    @cached_property
    def has_steps(self) -> bool:
        return any(rank.step for rank in self.picture.ranks)

    def about(
        self,
        rank: RankState,
        cause: Cause,
        *,
        what: str,
        next_step: str,
        is_certain: bool = False,
        since_s: float | None = None,
    ) -> Diagnosis:
        """A diagnosis on this rank; without a `since_s`, since it last moved."""
        return Diagnosis(
            cause=cause,
            host=rank.host,
            rank=rank.rank,
            step=rank.step if self.has_steps else None,
            what=what,
            next_step=next_step,
            is_certain=is_certain,
            since_s=rank.still_s if since_s is None else since_s,
            num_blocked=len(self.waiting.keys() - {rank.rank}),
        )

    @cached_property
    def waiting(self) -> dict[int, Collective | None]:
        """By rank: what it waits in for others; None when that is known by its stack or its phase only."""
        behind = {rank.rank for rank in self.behind}
        return {
            rank.rank: pending(rank)
            for rank in self.in_loop
            if rank.rank not in behind and seems_to_wait(rank)
        }

    @cached_property
    def behind(self) -> list[RankState]:
        """Those who did not enter what others are in, or are at an earlier place of the same step."""
        alive = self.in_loop
        front = _front(alive)
        if front is not None:
            missing = [
                rank for rank in alive if not pending(rank) and _last(rank, front.group) < front.number
            ]
            return [rank for rank in missing if rank.collectives or not _is_stuck_in_meeting(rank)]
        places = [place for rank in alive if (place := _place(rank)) is not None]
        late = [rank for rank in alive if (place := _place(rank)) is not None and place < max(places)]
        newest = max((rank.collective for rank in alive), default=0)
        return late or [rank for rank in alive if rank.collective < newest]


def has_ended(rank: RankState) -> bool:
    return rank.state in GONE or rank.exit is not None


def is_done(rank: RankState) -> bool:
    """Out of the loop, and in order as far as it knows."""
    return rank.phase in OUT if rank.exit is None else rank.exit in ORDERLY_EXITS


def is_busy(rank: RankState) -> bool:
    return rank.cpu >= BUSY_CORES or rank.has_io


def pending(rank: RankState) -> Collective | None:
    """The oldest collective that it entered and that is not done."""
    return next((one for one in rank.collectives if not one.is_done), None)


def _front(ranks: Sequence[RankState]) -> Collective | None:
    """The collective that most ranks wait in."""
    waits = Counter((one.group, one.number) for rank in ranks if (one := pending(rank)))
    if not waits:
        return None
    (group, number), _ = max(waits.items(), key=lambda item: (item[1], item[0][1]))
    return next(
        one for rank in ranks if (one := pending(rank)) and (one.group, one.number) == (group, number)
    )


def _last(rank: RankState, group: str) -> int:
    return max((one.number for one in rank.collectives if one.group == group), default=-1)


def _place(rank: RankState) -> tuple[int, int, int] | None:
    order = _ORDER.get(rank.phase)
    return None if order is None else (rank.step, rank.micro, order)


def seems_to_wait(rank: RankState) -> bool:
    """For others: in a collective, as far as can be told."""
    return pending(rank) is not None or _is_stuck_in_meeting(rank)


def _is_stuck_in_meeting(rank: RankState) -> bool:
    """By stack, or without one by phase: a rank that waits for others most often waits in its backward pass."""
    if rank.answers is False or rank.state in "TtD":
        return False
    if rank.stack:
        return is_meeting(rank.stack) and not is_loading(rank.stack) and rank.phase is not Phase.DATA
    return rank.phase is Phase.BACKWARD and rank.cpu < BUSY_CORES
