"""Decides when a diagnosis is reported, and when it is acted on.

Certain symptoms are diagnosed at once. If there is no progress for longer than is usual in this
run, that is reported, again at growing intervals, and acted on after `hang_s`; a compilation much
later.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace

from drumline.base.rank_environment import LOST_AFTER_S
from drumline.base.text import duration
from drumline.watch.cluster_state import Answer, ClusterState, LostNode, RankState
from drumline.watch.diagnosis.blocked import (
    CERTAINLY_STOPPED_S,
    find_blocked,
    find_debugged,
    find_stopped,
    find_unknown,
)
from drumline.watch.diagnosis.diagnosis import Alarm, Cause, Diagnosis
from drumline.watch.diagnosis.evidence import (
    OUT_OF_LOOP,
    Evidence,
    has_ended,
    has_exited,
    is_busy,
    is_done,
    pending,
)
from drumline.watch.diagnosis.exited import find_exited, find_lost_connection
from drumline.watch.diagnosis.mismatch import find_left_early, find_mismatch, find_teardown
from drumline.watch.diagnosis.unreachable import (
    find_late_node,
    find_never_seen,
    find_unreachable,
    is_unreachable,
    was_done,
)
from drumline.watch.heartbeat import COMPILE_FACTOR, Phase

_SUSPECT_S = 2.0
_SUSPECT_SLOW_S = 5.0
_AGAIN_S = 5.0
_SOON_S = 0.5
_GRACE_S = 0.4
_GRACE_UNKNOWN_S = 1.0
"""After a rank exited, the errors of others, and the launcher's record of its exit, arrive later.
The longer one is for a rank whose cause is not known yet."""

_MAX_COLLECTING_S = 2.5
_COLLECTING_S = 0.5
_AWAKE_S = 2.0
_SLOW_S = 60.0
_SLOW_IDLE_S = 10.0
"""When a long phase is reported: if the rank computes, and if it does not."""

_START_S = (
    60.0  # the least time for the first steps: libraries are loaded and kernels compiled in them
)
_REPEAT_S = 30.0

# when a compilation is reported, at the latest after half of its time
_COMPILE_S = 600.0
_NUM_FIRST_STEPS = 3
_NUM_FIRST_MARKS = 40
_NUM_FIRST_MOVES = 5
_NUM_RECENT = 10
_ENDED = (Cause.KILLED, Cause.ENDED, Cause.OUT_OF_MEMORY, Cause.EXCEPTION)

# The order matters: the cause must be named, not the ranks that wait for it or fail because of it.
# So a rank with its own cause comes before those that lost a connection, and one that cannot run
# before one that may only be slow.
_CHECKS: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    find_exited,
    find_stopped,
    find_unreachable,
    find_left_early,
    find_mismatch,
    find_never_seen,
    find_lost_connection,
    find_debugged,
    find_late_node,
    find_teardown,
    find_blocked,
    find_unknown,
)


# Symptoms, and how long the run has been idle

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
    ended = (rank for rank in ranks if has_ended(rank) and not is_done(rank))
    return frozenset(f"rank {rank.rank} exited" for rank in ended)


def stop_symptoms(ranks: Collection[RankState]) -> frozenset[str]:
    """Ranks that are stopped by a signal."""
    stopped = (rank for rank in ranks if rank.state == "T" and rank.state_s >= CERTAINLY_STOPPED_S)
    return frozenset(f"rank {rank.rank} is stopped" for rank in stopped)


def urgent_symptoms(ranks: Collection[RankState]) -> frozenset[str]:
    """What is diagnosed at once."""
    return exit_symptoms(ranks) | stop_symptoms(ranks)


def _left_s(rank: RankState) -> float:
    """How long ago a rank that is done left the loop, or exited."""
    return max(rank.age_s, rank.state_s) if has_exited(rank) else rank.age_s


class IdleTime:
    """How long the whole run has made no progress, and how long is unusual."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.limit_s = _MIN_LIMIT_S
        """Longer than this without progress and without work is unusual."""

        self.busy_limit_s = _MIN_BUSY_LIMIT_S
        """The same while some rank computes: long computations do not make long waits usual."""

        self.num_moves = 0
        self.last_idle_s = 0.0
        """Before the latest progress."""

        self.observed_at: float | None = None
        self._keys: dict[int, Hashable] = {}
        """By rank: the latest progress."""

        self._was_untimed = True
        """Whether a rank was in a phase of `UNTIMED` at the latest observation."""

        self._gaps: deque[tuple[float, float, bool]] = deque(maxlen=4 * int(_RECENT_S))
        """When each wait ended, how long it was, and whether a rank computed then."""

    def observe(
        self,
        cluster: ClusterState,
        now: float,
        *,
        counts: bool,
        is_busy: bool = False,
    ) -> bool:
        """Whether there was progress. `counts`: the time before it is typical; `is_busy`: some rank
        computed then."""
        self.add_time(now, at_most_s=_MAX_GAP_S)

        # A failure is not progress.
        keys = {
            rank.rank: _progress_of(rank)
            for rank in cluster.ranks
            if rank.phase is not Phase.FAILED
        }

        moved = any(self._keys.get(rank, key) != key for rank, key in keys.items())
        self._keys.update(keys)

        if moved:
            self.num_moves += 1
            if counts and not self._was_untimed:
                self._learn(now, is_busy=is_busy)

            self.last_idle_s = self.idle_s
            self.idle_s = 0.0

        self._was_untimed = any(rank.phase in UNTIMED for rank in cluster.ranks)
        return moved

    def add_time(self, now: float, *, at_most_s: float) -> None:
        """Count the time since the last observation as idle, but at most this much."""
        passed = 0.0 if self.observed_at is None else now - self.observed_at
        self.idle_s += min(max(passed, 0.0), at_most_s)
        self.observed_at = now

    def _learn(self, now: float, *, is_busy: bool) -> None:
        """Add the wait that has just ended to what is usual, and forget old ones."""
        self._gaps.append((now, self.idle_s, is_busy))
        while self._gaps[0][0] < now - _RECENT_S:
            self._gaps.popleft()

        idle_gaps = [gap for _, gap, was_busy in self._gaps if not was_busy]
        self.limit_s = max(_MIN_LIMIT_S, _unusual_s(idle_gaps))

        all_gaps = [gap for _, gap, _ in self._gaps]
        self.busy_limit_s = max(
            _MIN_BUSY_LIMIT_S,
            _BUSY_FACTOR * self.limit_s,
            2.0 * _unusual_s(all_gaps),
        )


def _progress_of(rank: RankState) -> Hashable:
    """Differs from the one before if the rank has made progress."""
    marks = (rank.phase, rank.num_marks, rank.num_moves)
    return rank.step, rank.micro, rank.collective, marks


def _unusual_s(gaps: list[float]) -> float:
    """The limit from the observed waits: a single long wait does not raise it, two do."""
    if len(gaps) < 2:
        return 0.0

    _, second_longest = heapq.nlargest(2, gaps)
    usual = statistics.median_low(gaps[-_NUM_USUAL:])
    return 2.0 * max(second_longest, usual)


# The watchdog


def diagnose(cluster: ClusterState) -> Diagnosis | None:
    """The most likely cause; None: nothing is known about any rank."""
    evidence = Evidence(cluster)
    for check in _CHECKS:
        if diagnosis := check(evidence):
            return diagnosis
    return None


@dataclass(frozen=True)
class Recovery:
    """A run that continues by itself after an alarm."""

    diagnosis: Diagnosis
    idle_s: float

    @property
    def sentence(self) -> str:
        """`the run continues after 12 s (it was held up by rank 3 on gpu-02)`."""
        who = self.diagnosis.host
        if self.diagnosis.rank is not None:
            who = f"rank {self.diagnosis.rank} on {who}"
        return f"the run continues after {duration(self.idle_s)} (it was held up by {who})"


class Watchdog:
    """Decides when to collect evidence, and which alarm to raise for a diagnosis. The caller passes
    the time."""

    def __init__(
        self,
        *,
        hang_s: float | None,
        world_size: int,
        lost_s: float = LOST_AFTER_S,
    ) -> None:
        """`hang_s`: None: a rank that may still continue is never acted on. `lost_s`: the same for
        a host that is unreachable."""
        self._lost_s = lost_s
        self._hang_s = math.inf if hang_s is None else hang_s
        self._world_size = world_size
        self.wants_evidence = False
        """Whether to collect evidence from all nodes, diagnose, and call `decide`."""

        self._idle = IdleTime()
        self._cluster = ClusterState(me=0, nodes=())
        self._first_step: int | None = None
        """The first that was seen."""

        self._awake_from = 0.0
        """From then on missing heartbeats count again: this process had no CPU time before."""

        self._work: dict[int, deque[bool]] = {}
        """By rank: whether it worked at the latest observations."""

        self._symptoms: frozenset[str] = frozenset()
        """The current ones."""

        self._symptoms_since = 0.0
        """When the latest of them appeared."""

        self._examined: frozenset[str] = frozenset()
        """Those that have been diagnosed."""

        self._examine_at_s: float | None = None
        """The idle time at which evidence is collected next; None: not known yet."""

        self._alarm: tuple[Alarm, Diagnosis] | None = None
        """The latest, until the run continues."""

        self._alarm_at = (0, 0)
        """The progress of the run then."""

        self._alarm_idle_s = 0.0
        """The idle time then."""

        self._max_idle_s = 0.0
        """The longest wait since then."""

        self._has_moved = False

    def observe(self, cluster: ClusterState, now: float) -> Recovery | None:
        """Look at the current state; sets `wants_evidence`."""
        self.wants_evidence = False
        observed_at = self._idle.observed_at
        if observed_at is not None and now - observed_at > _AWAKE_S:
            self._awake_from = now + _AWAKE_S

        self._follow(cluster, now)
        has_moved = self._has_moved
        self._has_moved = False

        # After a stall any progress ends it; after a hang that was only reported, the run must get
        # further.
        is_past_alarm = not self._is_final() or _progress(cluster) > self._alarm_at
        if has_moved and self._alarm and is_past_alarm:
            alarm, diagnosis = self._alarm
            self._alarm = None
            if alarm is not Alarm.FAILURE:
                return Recovery(diagnosis, self._max_idle_s)

        if not self._is_final() and not self._is_over():
            self.wants_evidence = self._has_new_symptom(now) or self._is_time()

        return None

    @property
    def is_in_grace(self) -> bool:
        """Whether there is a symptom that is diagnosed within a second."""
        return not self._symptoms <= self._examined

    def decide(
        self,
        diagnosis: Diagnosis | None,
        cluster: ClusterState,
        now: float,
    ) -> Alarm | None:
        """The alarm to raise, or None. `cluster`: the current state: collecting evidence takes a
        second or two, and a run that made progress meanwhile does not hang."""
        self._idle.add_time(now, at_most_s=_MAX_COLLECTING_S)
        self._follow(cluster, now)
        if diagnosis is None or self._is_final() or self._is_over():
            return None

        alarm = self._choose_alarm(diagnosis)
        if alarm is None and diagnosis.cause in _ENDED:
            # soon it is known which rank was first, or never
            self._examine_at_s = self._idle.idle_s + _SOON_S

        if alarm is None or (alarm is Alarm.STALL and self._is_reported(diagnosis)):
            return None

        self._alarm = (alarm, diagnosis)
        self._alarm_at = _progress(self._cluster)
        self._alarm_idle_s = self._idle.idle_s
        self._max_idle_s = 0.0
        return alarm

    def with_duration(self, diagnosis: Diagnosis, *, ends_job: bool) -> Diagnosis:
        """A stall that is reported again says how long it has lasted. `ends_job`: whether a hang
        ends the job."""
        if diagnosis.may_return and ends_job:
            end = f"ends the job when this has lasted {duration(self._lost_s)}"
            return replace(diagnosis, next_step=f"{diagnosis.next_step}; the watchdog {end}")

        idle_s = self._idle.idle_s
        if idle_s < _REPEAT_S:
            return diagnosis

        limit_s = self._act_s(diagnosis)
        end = "does not end the job for this"
        if ends_job and limit_s < math.inf:
            end = f"ends the job after {duration(limit_s)}"

        what = f"{diagnosis.what}; for {duration(idle_s)} so far"
        return replace(diagnosis, what=what, next_step=f"{diagnosis.next_step}; the watchdog {end}")

    def _follow(self, cluster: ClusterState, now: float) -> None:
        """Note the current state, and whether there was progress."""
        self._cluster = cluster
        counts = self._num_steps() > 0
        if self._idle.observe(cluster, now, counts=counts, is_busy=self._any_computes()):
            self._has_moved = True
            self._examine_at_s = None
            self._max_idle_s = max(self._max_idle_s, self._idle.last_idle_s)

        for rank in cluster.ranks:
            if self._first_step is None and rank.num_marks:
                self._first_step = rank.step
            recent = self._work.setdefault(rank.rank, deque(maxlen=_NUM_RECENT))
            recent.append(is_busy(rank) or rank.state == "R")

    # When to collect evidence

    def _has_new_symptom(self, now: float) -> bool:
        """Whether a symptom is new and old enough that its causes are known."""
        exited = exit_symptoms(self._cluster.ranks)
        symptoms = exited | self._other_symptoms(now)
        if symptoms - self._symptoms:
            self._symptoms_since = now

        self._symptoms = symptoms
        if symptoms <= self._examined:
            self._examined = symptoms
            return False

        is_unknown = any(
            has_exited(rank) and rank.exit is None and not rank.failure
            for rank in self._cluster.ranks
        )
        grace_s = _GRACE_UNKNOWN_S if is_unknown else _GRACE_S
        if exited and now - self._symptoms_since < grace_s:
            return False

        self._examined = symptoms
        self._examine_at_s = self._idle.idle_s + _AGAIN_S / 2
        return True

    def _other_symptoms(self, now: float) -> frozenset[str]:
        """Ranks that are stopped; without progress also those that left, and lost nodes."""
        symptoms = stop_symptoms(self._cluster.ranks)
        if self._idle.idle_s < STILL_S:
            return symptoms

        ranks = self._cluster.ranks
        done = [rank for rank in ranks if is_done(rank)]
        if len(done) < len(ranks):
            symptoms |= {f"rank {rank.rank} left" for rank in done if _left_s(rank) >= _LEFT_S}

        # If this sidecar had no CPU time recently, missing heartbeats mean nothing.
        if now >= self._awake_from:
            lost = filter(self._is_amiss, self._cluster.lost)
            symptoms |= {f"node {node.node} is lost" for node in lost}

        return symptoms

    def _is_amiss(self, node: LostNode) -> bool:
        """Whether a lost node is a symptom: it was not done."""
        if was_done(self._cluster, node):
            return False

        # If something answers, perhaps only the sidecar has exited, and the run continues.
        is_dead = bool(node.how) and node.answer is not Answer.REFUSED
        is_long = self._idle.idle_s >= self._idle.limit_s
        return is_unreachable(node) and (is_dead or is_long)

    def _is_time(self) -> bool:
        """Whether to collect evidence now: after the first unusual wait, at each limit, and at
        intervals in between."""
        idle_s = self._idle.idle_s
        limit_s = self._idle.limit_s
        if self._examine_at_s is None:
            suspect_s = _SUSPECT_SLOW_S if self._takes_long() else _SUSPECT_S
            self._examine_at_s = max(suspect_s, 0.75 * limit_s)

        if idle_s < self._examine_at_s:
            return False

        again = idle_s + max(_AGAIN_S, 0.5 * idle_s)
        if self._alarm is not None and self._alarm[1].may_return:
            # Whether an unreachable host has returned: its last heartbeat and the last progress are
            # not from the same moment.
            again = idle_s + _SOON_S

        compile_s = COMPILE_FACTOR * self._hang_s
        limits = (limit_s, self._idle.busy_limit_s, self._hang_s, compile_s, self._repeat_s())
        self._examine_at_s = min([again, *(limit for limit in limits if limit > idle_s)])
        return True

    # Which alarm to raise

    def _choose_alarm(self, diagnosis: Diagnosis) -> Alarm | None:
        """Whether this is a failure, a hang, a stall, or nothing yet."""
        idle_s = self._idle.idle_s
        if diagnosis.is_certain:
            if diagnosis.cause not in (*_ENDED, Cause.STOPPED) and idle_s < STILL_S:
                return None

            has_failed = diagnosis.cause in _ENDED or exit_symptoms(self._cluster.ranks)
            return Alarm.FAILURE if has_failed else Alarm.HANG

        if diagnosis.cause in _ENDED:
            return None

        if diagnosis.may_return:
            if idle_s < STILL_S:
                return None
            return Alarm.HANG if diagnosis.since_s >= self._lost_s else Alarm.STALL

        # If it began only recently, there was progress while evidence was collected, which no
        # observation saw.
        idle_s = min(idle_s, diagnosis.since_s + _COLLECTING_S)
        is_hang = idle_s >= self._act_s(diagnosis) and diagnosis.cause is not Cause.DEBUGGED
        if is_hang and self._holds_up(diagnosis):
            return Alarm.HANG

        return Alarm.STALL if idle_s >= self._report_s(diagnosis) else None

    def _report_s(self, diagnosis: Diagnosis) -> float:
        """How long the run must be idle before a stall is reported."""
        if diagnosis.cause is Cause.COMPILING:
            return min(_COMPILE_S, self._act_s(diagnosis) / 2)

        limit_s = self._idle.limit_s
        busy_limit_s = self._idle.busy_limit_s
        if not _is_waited_for(diagnosis) and self._any_computes():
            if self._is_plain():
                return math.inf
            return max(_SLOW_S * self._slowdown(), busy_limit_s)

        ranks = self._work if diagnosis.rank is None else [diagnosis.rank]
        works = diagnosis.cause is Cause.SLOW or self._any_computes(ranks)
        if self._takes_long():
            usual_s = _SLOW_S if works else _SLOW_IDLE_S
            return max(usual_s * self._slowdown(), limit_s)

        return busy_limit_s if works else limit_s

    def _act_s(self, diagnosis: Diagnosis) -> float:
        """`hang_s`, if some rank is blocked; or if there were heartbeats, and they stopped while no
        rank computes."""
        if not _is_waited_for(diagnosis) and (self._any_computes() or self._is_plain()):
            return math.inf

        # Before the first step ranks wait through the store; later in a collective, which has a
        # limit of its own.
        waits_in_step = any(
            pending(rank) or rank.phase is Phase.BACKWARD for rank in self._cluster.ranks
        )
        if diagnosis.cause is Cause.COMPILING and not waits_in_step:
            return COMPILE_FACTOR * self._hang_s

        return max(self._hang_s, _START_S) if self._is_young() else self._hang_s

    def _repeat_s(self) -> float:
        """How long the run must be idle before a stall is reported again."""
        return math.inf if self._alarm is None else max(_REPEAT_S, 2.0 * self._alarm_idle_s)

    def _holds_up(self, diagnosis: Diagnosis) -> bool:
        """Whether any rank waits for it: a rank with more work after the loop blocks no other."""
        other_ranks = [rank for rank in self._cluster.ranks if rank.rank != diagnosis.rank]
        if diagnosis.cause is Cause.TEARDOWN or not other_ranks:
            return True
        return not all(map(is_done, other_ranks))

    def _is_reported(self, diagnosis: Diagnosis) -> bool:
        """A stall is reported again at growing intervals, a new cause at once, a debugged rank only
        once."""
        if self._alarm is None:
            return False

        is_due = self._idle.idle_s >= self._repeat_s()
        if is_due and diagnosis.cause is not Cause.DEBUGGED and self._holds_up(diagnosis):
            return False

        return self._alarm[1].cause is not Cause.UNKNOWN or diagnosis.cause is Cause.UNKNOWN

    def _is_final(self) -> bool:
        """Whether an alarm was raised that ends the run, or would."""
        return self._alarm is not None and self._alarm[0] is not Alarm.STALL

    # What the run is doing

    def _is_over(self) -> bool:
        """Whether every rank has left the loop and the group, or exited without an error."""
        ranks = self._cluster.ranks
        if len(ranks) < self._world_size or not all(map(is_done, ranks)):
            return False
        return all(rank.phase is not Phase.LEAVING or has_exited(rank) for rank in ranks)

    def _takes_long(self) -> bool:
        """Whether it starts, evaluates, saves, or some ranks are done and others are not."""
        ranks = self._cluster.ranks
        if self._is_young() or any(map(is_done, ranks)):
            return True
        if self._is_plain():
            return False
        return any(rank.phase in UNTIMED and not has_exited(rank) for rank in ranks)

    def _is_young(self) -> bool:
        """Whether the run is in its first steps, which are not typical."""
        if self._is_plain():
            return self._idle.num_moves < _NUM_FIRST_MOVES

        num_marks = max((rank.num_marks for rank in self._cluster.ranks), default=0)
        return self._num_steps() < _NUM_FIRST_STEPS and num_marks < _NUM_FIRST_MARKS

    def _slowdown(self) -> float:
        """How much longer a start takes than on hosts with free CPUs: the first steps wait for the
        slowest host. 1 after the start."""
        if not self._is_young():
            return 1.0
        return max((node.slowdown for node in self._cluster.nodes), default=1.0)

    def _num_steps(self) -> int:
        """The steps since the first one that was seen, which is not typical: kernels are compiled
        in it."""
        steps = [rank.step for rank in self._cluster.ranks]
        if not any(steps):
            return self._idle.num_moves // _NUM_FIRST_MOVES

        return max(steps) - (self._first_step or 0)

    def _is_plain(self) -> bool:
        """Whether it is a loop without heartbeats: only collectives and steps of DDP are
        visible."""
        return all(rank.num_marks < 2 or rank.phase in OUT_OF_LOOP for rank in self._cluster.ranks)

    def _any_computes(self, ranks: Iterable[int] | None = None) -> bool:
        """Whether one of these ranks (default: all) used the CPU in most of the latest
        observations."""
        numbers = self._work if ranks is None else ranks
        recent = (self._work.get(rank, ()) for rank in numbers)
        return any(2 * sum(observations) > len(observations) for observations in recent)


def _is_waited_for(diagnosis: Diagnosis) -> bool:
    """Whether other ranks wait for it, or the user, because the job is done but does not exit."""
    return diagnosis.num_blocked > 0 or diagnosis.cause is Cause.TEARDOWN


def _progress(cluster: ClusterState) -> tuple[int, int]:
    """The furthest step, and the furthest collective."""
    step = max((rank.step for rank in cluster.ranks), default=0)
    collective = max((rank.collective for rank in cluster.ranks), default=0)
    return step, collective
