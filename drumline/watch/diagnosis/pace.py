"""How a run usually moves, and for how long it has not: what is long for one run is a single step of another."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Hashable

from drumline.watch.cluster_state import ClusterState, RankState
from drumline.watch.heartbeat import Phase

_LATE_S = 1.0
"""The most that one look may add: a sidecar that got no CPU did not see that nothing moved."""
_FLOOR_S = 3.0
_RECENT_S = 600.0
_NUM_USUAL = 64
_BUSY_FACTOR, _BUSY_FLOOR_S = 4.0, 10.0
"""A rank that works may be slow, and then its peers wait in every step."""
QUIET = (Phase.START, Phase.EVALUATION, Phase.SAVE)
"""They take as long as they take, and say nothing of the pace of steps."""


class IdleTime:
    """Looks at one picture after the other. `still_s`: for how long nothing has moved in the whole run."""

    def __init__(self) -> None:
        self.still_s = 0.0
        self.limit_s = _FLOOR_S
        """To stand idle for longer than this is unusual."""
        self.busy_limit_s = _BUSY_FLOOR_S
        """To stand for longer than this while somebody computes is: a long computation makes no long wait usual."""
        self.num_moves = 0
        self.stood_s = 0.0
        """How long it stood before the last move."""
        self._keys: dict[int, Hashable] = {}
        self._looked: float | None = None
        self._was_quiet = True
        self._gaps: deque[tuple[float, float, bool]] = deque(maxlen=4 * int(_RECENT_S))

    def look(self, picture: ClusterState, now: float, *, counts: bool, is_busy: bool = False) -> bool:
        """Whether anything moved. `counts`: whether the time before it is typical of the run; `is_busy`: whether
        somebody has computed in it."""
        self.pass_time(now, at_most_s=_LATE_S)
        # To fail is not to move.
        keys = {rank.rank: _key(rank) for rank in picture.ranks if rank.phase is not Phase.FAILED}
        moved = any(self._keys.get(rank, key) != key for rank, key in keys.items())
        self._keys.update(keys)
        if moved:
            self.num_moves += 1
            if counts and not self._was_quiet:
                self._learn(now, is_busy=is_busy)
            self.stood_s, self.still_s = self.still_s, 0.0
        self._was_quiet = any(rank.phase in QUIET for rank in picture.ranks)
        return moved

    def pass_time(self, now: float, *, at_most_s: float) -> None:
        passed = 0.0 if self._looked is None else now - self._looked
        self.still_s += min(max(passed, 0.0), at_most_s)
        self._looked = now

    def _learn(self, now: float, *, is_busy: bool) -> None:
        self._gaps.append((now, self.still_s, is_busy))
        while self._gaps[0][0] < now - _RECENT_S:
            self._gaps.popleft()
        self.limit_s = max(_FLOOR_S, _unusual_s([gap for _, gap, busy in self._gaps if not busy]))
        longest = _unusual_s([gap for _, gap, _ in self._gaps])
        self.busy_limit_s = max(_BUSY_FLOOR_S, _BUSY_FACTOR * self.limit_s, 2.0 * longest)


def _unusual_s(gaps: list[float]) -> float:
    """One long wait alone does not make it usual; two do."""
    if len(gaps) < 2:
        return 0.0
    return 2.0 * max(heapq.nlargest(2, gaps)[1], statistics.median_low(gaps[-_NUM_USUAL:]))


def _key(rank: RankState) -> Hashable:
    """What changes when a rank moves."""
    return rank.step, rank.phase, rank.micro, rank.num_marks, rank.num_moves, rank.collective
