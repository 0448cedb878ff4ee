"""When the watchdog collects evidence: on symptoms that are certainly wrong, and when there is no
progress for longer than is usual in this run."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Collection, Hashable, Mapping

from drumline.watch.cluster_state import Answer, ClusterState, LostNode, RankState
from drumline.watch.diagnosis.blocked import CERTAINLY_STOPPED_S
from drumline.watch.diagnosis.evidence import has_exited, is_done
from drumline.watch.diagnosis.unreachable import find_one_way, is_unreachable
from drumline.watch.heartbeat import Phase

STILL_S = 1.5
"""While a run makes progress, all of its ranks do: no host is lost, and no needed rank has left."""
_LEFT_S = 1.5
_MAX_GAP_S = (
    1.0  # the most that one observation may add: a sidecar without CPU time has observed nothing
)
_MIN_LIMIT_S = 3.0
_RECENT_S = 600.0
_NUM_USUAL = 64
# a rank that computes may be slow, and then its peers wait in every step
_BUSY_FACTOR = 4.0
_MIN_BUSY_LIMIT_S = 10.0
UNTIMED = (Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.COMPILE, Phase.COMPILED)
"""Phases whose duration does not depend on the speed of steps."""


def exit_symptoms(ranks: Collection[RankState]) -> frozenset[str]:
    """Ranks that have exited or failed, and were not done."""
    return frozenset(
        f"rank {rank.rank} exited"
        for rank in ranks
        if not is_done(rank) and (has_exited(rank) or rank.failure or rank.phase is Phase.FAILED)
    )


def stop_symptoms(ranks: Collection[RankState]) -> frozenset[str]:
    """Ranks that are stopped by a signal."""
    stopped = (rank for rank in ranks if rank.state == "T" and rank.state_s >= CERTAINLY_STOPPED_S)
    return frozenset(f"rank {rank.rank} is stopped" for rank in stopped)


def urgent_symptoms(ranks: Collection[RankState]) -> frozenset[str]:
    return exit_symptoms(ranks) | stop_symptoms(ranks)


def other_symptoms(
    cluster: ClusterState,
    last_states: Mapping[int, RankState],
    *,
    idle_s: float,
    limit_s: float,
    was_awake: bool,
) -> frozenset[str]:
    """`last_states`: the last state of every rank, including those of lost nodes. `was_awake`: whether
    this sidecar had CPU time recently; otherwise missing heartbeats mean nothing."""
    symptoms = set(stop_symptoms(last_states.values()))
    if idle_s < STILL_S:
        return frozenset(symptoms)
    done = [rank for rank in last_states.values() if is_done(rank)]
    if len(done) < len(last_states):
        symptoms.update(
            f"rank {rank.rank} left"
            for rank in done
            if max(rank.age_s, rank.state_s if has_exited(rank) else 0.0) >= _LEFT_S
        )
    if was_awake:
        is_long = idle_s >= limit_s
        symptoms.update(
            f"node {node.node} is lost"
            for node in cluster.lost
            if _is_amiss(node, last_states, is_long)
        )
        one_way = find_one_way(cluster)
        if one_way is not None:
            symptoms.add(f"node {one_way.receiver.node} does not hear node {one_way.sender.node}")
    return frozenset(symptoms)


def _is_amiss(node: LostNode, last_states: Mapping[int, RankState], is_long: bool) -> bool:
    if node.ranks and all(
        rank in last_states and is_done(last_states[rank]) for rank in node.ranks
    ):
        return False
    # If something answers, perhaps only the sidecar has exited, and the run continues.
    is_dead = bool(node.how) and node.answer is not Answer.REFUSED
    return is_unreachable(node) and (is_dead or is_long)


class IdleTime:
    """How long the whole run has made no progress, and how long is unusual."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.limit_s = _MIN_LIMIT_S  # longer than this without progress and without work is unusual
        self.busy_limit_s = _MIN_BUSY_LIMIT_S
        """The same while some rank computes: long computations do not make long waits usual."""
        self.num_moves = 0
        self.last_idle_s = 0.0  # before the latest progress
        self._keys: dict[int, Hashable] = {}
        self._observed: float | None = None
        self._was_untimed = True
        self._gaps: deque[tuple[float, float, bool]] = deque(maxlen=4 * int(_RECENT_S))

    def observe(
        self, cluster: ClusterState, now: float, *, counts: bool, is_busy: bool = False
    ) -> bool:
        """Whether there was progress. `counts`: the time before it is typical; `is_busy`: some rank
        computed then."""
        self.add_time(now, at_most_s=_MAX_GAP_S)
        # A failure is not progress.
        keys = {
            rank.rank: (
                rank.step,
                rank.phase,
                rank.micro,
                rank.num_marks,
                rank.num_moves,
                rank.collective,
            )
            for rank in cluster.ranks
            if rank.phase is not Phase.FAILED
        }
        moved = any(self._keys.get(rank, key) != key for rank, key in keys.items())
        self._keys.update(keys)
        if moved:
            self.num_moves += 1
            if counts and not self._was_untimed:
                self._learn(now, is_busy=is_busy)
            self.last_idle_s, self.idle_s = self.idle_s, 0.0
        self._was_untimed = any(rank.phase in UNTIMED for rank in cluster.ranks)
        return moved

    def add_time(self, now: float, *, at_most_s: float) -> None:
        passed = 0.0 if self._observed is None else now - self._observed
        self.idle_s += min(max(passed, 0.0), at_most_s)
        self._observed = now

    def _learn(self, now: float, *, is_busy: bool) -> None:
        self._gaps.append((now, self.idle_s, is_busy))
        while self._gaps[0][0] < now - _RECENT_S:
            self._gaps.popleft()
        self.limit_s = max(
            _MIN_LIMIT_S, _unusual_s([gap for _, gap, busy in self._gaps if not busy])
        )
        longest = _unusual_s([gap for _, gap, _ in self._gaps])
        self.busy_limit_s = max(_MIN_BUSY_LIMIT_S, _BUSY_FACTOR * self.limit_s, 2.0 * longest)


def _unusual_s(gaps: list[float]) -> float:
    """The limit from the observed waits: a single long wait does not raise it, two do."""
    if len(gaps) < 2:
        return 0.0
    return 2.0 * max(heapq.nlargest(2, gaps)[1], statistics.median_low(gaps[-_NUM_USUAL:]))
