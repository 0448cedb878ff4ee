"""When is something wrong, and when is it time to say so, or to act?

The leader of the sidecars shows it every picture, about twice a second. What is certain (a process has exited, a rank
is stopped, a host is unreachable) is diagnosed at once. All else may be harmless: when nothing has moved for longer
than is usual in this run, it is reported, again at growing intervals, and acted on after `hang_s`. While ranks compute
and none is blocked in a collective, nothing is done.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

from drumline.watch.cluster_state import ClusterState, RankState
from drumline.watch.diagnosis import triggers
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import BUSY_CORES, OUT, has_ended, is_done
from drumline.watch.diagnosis.pace import QUIET, IdleTime
from drumline.watch.diagnosis.phrases import seconds
from drumline.watch.heartbeat import Phase

_SUSPECT_S, _SUSPECT_QUIET_S = 2.0, 5.0
_AGAIN_S = 5.0
_LOOK_AGAIN_S = 0.5
_GRACE_S = 0.4
"""After a rank ended: the others' last words, and the launcher's alarm on how, are still on their way."""
_GRACE_WITHOUT_WORD_S = 1.0
_GATHERING_S = 2.5
_LOOKING_S = 0.5
_AWAKE_S = 2.0
_QUIET_S, _QUIET_IDLE_S = 60.0, 10.0
"""What takes its time is reported later: when it computes, and when it does not."""
_START_S = 60.0
"""The least patience with the first steps: libraries are loaded and kernels compiled in them."""
_REPEAT_S = 30.0
_NUM_FIRST_STEPS, _NUM_FIRST_BEATS, _NUM_FIRST_MOVES = 3, 40, 5
_NUM_RECENT = 10
ENDED = (Cause.KILLED, Cause.OUT_OF_MEMORY, Cause.EXCEPTION)


class Alarm(StrEnum):
    STALL = "stall"
    """It stands, and may go on: told, and no more."""
    HANG = "hang"
    """It stands, and will not go on or has had its time."""
    FAILURE = "failure"
    """A rank has ended."""


@dataclass(frozen=True)
class Recovery:
    """What was told goes on by itself."""

    diagnosis: Diagnosis
    stood_s: float

    @property
    def sentence(self) -> str:
        return f"the run goes on after {seconds(self.stood_s)} (it was held up by {_whom(self.diagnosis)})"


class Watchdog:
    """Holds the run's pace and what was said. Pure but for that: it is told the time."""

    def __init__(self, *, hang_s: float | None, world_size: int) -> None:
        """`hang_s`: None: what may be innocent is never acted on."""
        self._hang_s, self._world_size = math.inf if hang_s is None else hang_s, world_size
        self._pace = IdleTime()
        self._picture = ClusterState(me=0, nodes=())
        self._seen: dict[int, RankState] = {}
        self._first_step: int | None = None
        self._looked: float | None = None
        self._awake_from = 0.0
        self._work: dict[int, deque[bool]] = {}
        self._signs: frozenset[str] = frozenset()
        self._signs_since = 0.0
        self._gathered: frozenset[str] = frozenset()
        self._gather_at_s: float | None = None
        self._said: tuple[Alarm, Diagnosis] | None = None
        self._said_at = (0, 0)
        self._said_still_s = 0.0
        self._stood_s = 0.0
        self._has_moved = False
        self.wants_evidence = False

    def observe(self, picture: ClusterState, now: float) -> Recovery | None:
        self.wants_evidence = False
        if self._looked is not None and now - self._looked > _AWAKE_S:
            self._awake_from = now + _AWAKE_S
        self._follow(picture, now)
        has_moved, self._has_moved = self._has_moved, False
        if has_moved and (recovery := self._recovered()) is not None:
            return recovery
        if self._is_final() or self._is_over():
            return None
        self.wants_evidence = self._has_new_sign(now) or self._is_time()
        return None

    @property
    def is_in_grace(self) -> bool:
        """Whether there is a sign that is looked into within the second."""
        return not self._signs <= self._gathered

    def decide(self, diagnosis: Diagnosis | None, picture: ClusterState, now: float) -> Alarm | None:
        """What to say of it; None: nothing, or nothing new. `picture`: as it is by now. Gathering takes a second or
        two, which count as any others; what went on meanwhile does not stand."""
        self._pace.pass_time(now, at_most_s=_GATHERING_S)
        self._follow(picture, now)
        if diagnosis is None or self._is_final() or self._is_over():
            return None
        alarm = self._word(diagnosis)
        if alarm is None and diagnosis.cause in ENDED:
            self._gather_at_s = self._pace.still_s + _LOOK_AGAIN_S  # who was first comes out soon, or never
        if alarm is None or (alarm is Alarm.STALL and self._is_told(diagnosis)):
            return None
        self._said, self._said_at, self._stood_s = (alarm, diagnosis), _reached(self._picture), 0.0
        self._said_still_s = self._pace.still_s
        return alarm

    def with_duration(self, diagnosis: Diagnosis, *, ends_job: bool) -> Diagnosis:
        """What is reported again, with how long it has lasted by now. `ends_job`: whether patience has an end."""
        still, patience = self._pace.still_s, self._act_s(diagnosis)
        if still < _REPEAT_S:
            return diagnosis
        ends_job &= patience < math.inf
        end = f"ends the job after {seconds(patience)}" if ends_job else "does not end the job for that"
        return replace(
            diagnosis,
            what=f"{diagnosis.what}; for {seconds(still)} by now",
            next_step=f"{diagnosis.next_step}; the watchdog {end}",
        )

    def _follow(self, picture: ClusterState, now: float) -> None:
        self._picture, self._looked = picture, now
        # A node whose ranks are done goes silent, and what it said last still holds.
        self._seen.update((rank.rank, rank) for rank in picture.ranks)
        if self._pace.look(picture, now, counts=self._num_steps() > 0, is_busy=self._somebody_works()):
            self._has_moved, self._gather_at_s = True, None
            self._stood_s = max(self._stood_s, self._pace.stood_s)
        self._note(picture)

    # When to look closely

    def _has_new_sign(self, now: float) -> bool:
        ended = triggers.ended(self._seen.values())
        signs = ended | triggers.others(
            self._picture,
            self._seen,
            still_s=self._pace.still_s,
            limit_s=self._pace.limit_s,
            hears=now >= self._awake_from,
        )
        if signs != self._signs:
            self._signs, self._signs_since = signs, now if signs - self._signs else self._signs_since
        if signs <= self._gathered:
            self._gathered = signs
            return False
        if now - self._signs_since < (self._grace_s() if ended else 0.0):
            return False
        self._gathered = signs
        self._gather_at_s = self._pace.still_s + _AGAIN_S / 2
        return True

    def _grace_s(self) -> float:
        """Where nobody has said yet why a rank ended, it may take a moment longer."""
        gone = [rank for rank in self._picture.ranks if has_ended(rank)]
        without_word = any(rank.exit is None and not rank.failure for rank in gone)
        return _GRACE_WITHOUT_WORD_S if without_word else _GRACE_S

    def _is_time(self) -> bool:
        """At the first suspicion, at each limit, and now and then in between."""
        still = self._pace.still_s
        if self._gather_at_s is None:
            quiet = self._takes_its_time()
            self._gather_at_s = max(_SUSPECT_QUIET_S if quiet else _SUSPECT_S, 0.75 * self._pace.limit_s)
        if still < self._gather_at_s:
            return False
        limits = (self._pace.limit_s, self._pace.busy_limit_s, self._hang_s, self._repeat_s())
        again = still + max(_AGAIN_S, 0.5 * still)
        self._gather_at_s = min([limit for limit in limits if limit > still] + [again])
        return True

    # What to say

    def _word(self, diagnosis: Diagnosis) -> Alarm | None:
        still = self._pace.still_s
        if diagnosis.is_certain:
            if diagnosis.cause not in (*ENDED, Cause.STOPPED) and still < triggers.STANDS_S:
                return None
            broke = diagnosis.cause in ENDED or triggers.ended(self._seen.values())
            return Alarm.FAILURE if broke else Alarm.HANG
        if diagnosis.cause in ENDED:
            return None
        # What began only lately began while it was gathered: then something had moved that no look saw.
        still = min(still, diagnosis.since_s + _LOOKING_S)
        if (
            still >= self._act_s(diagnosis)
            and diagnosis.cause is not Cause.DEBUGGED
            and self._holds_up(diagnosis)
        ):
            return Alarm.HANG
        return Alarm.STALL if still >= self._tell_s(diagnosis) else None

    def _tell_s(self, diagnosis: Diagnosis) -> float:
        limit, works = self._pace.limit_s, self._works(diagnosis)
        if not _is_waited_for(diagnosis) and self._somebody_works():
            is_plain = self._is_plain(self._picture.ranks)
            return math.inf if is_plain else max(_QUIET_S, self._pace.busy_limit_s)
        if self._takes_its_time():
            return max(_QUIET_S if works else _QUIET_IDLE_S, limit)
        return self._pace.busy_limit_s if works else limit

    def _act_s(self, diagnosis: Diagnosis) -> float:
        """The user's patience, where somebody is blocked; or where there are heartbeats, and they stop without work."""
        if not _is_waited_for(diagnosis) and (self._somebody_works() or self._is_plain(self._picture.ranks)):
            return math.inf
        return max(self._hang_s, _START_S) if self._is_young() else self._hang_s

    def _repeat_s(self) -> float:
        """When what was reported is reported again."""
        return math.inf if self._said is None else max(_REPEAT_S, 2.0 * self._said_still_s)

    def _holds_up(self, diagnosis: Diagnosis) -> bool:
        """Whether anybody waits for it: a rank that has more to do than others after the loop is in nobody's way."""
        others = [rank for rank in self._seen.values() if rank.rank != diagnosis.rank]
        return diagnosis.cause is Cause.TEARDOWN or not others or not all(map(is_done, others))

    def _is_told(self, diagnosis: Diagnosis) -> bool:
        """A stall is told at growing intervals, a better reason for it at once; who debugs a rank knows."""
        if self._said is None:
            return False
        is_due = self._pace.still_s >= self._repeat_s()
        if is_due and diagnosis.cause is not Cause.DEBUGGED and self._holds_up(diagnosis):
            return False
        return self._said[1].cause is not Cause.UNKNOWN or diagnosis.cause is Cause.UNKNOWN

    def _is_final(self) -> bool:
        return self._said is not None and self._said[0] is not Alarm.STALL

    def _recovered(self) -> Recovery | None:
        """After a stall any move will do; after a hang that was only reported, the run has to come further."""
        if self._said is None or (self._is_final() and _reached(self._picture) <= self._said_at):
            return None
        (alarm, diagnosis), self._said = self._said, None
        return None if alarm is Alarm.FAILURE else Recovery(diagnosis, self._stood_s)

    # What kind of run it is at the moment

    def _is_over(self) -> bool:
        """Every rank has left the loop and the group, or ended in order."""
        ranks = self._seen.values()
        is_closing = any(rank.phase is Phase.LEAVING and not has_ended(rank) for rank in ranks)
        return len(ranks) >= self._world_size and all(map(is_done, ranks)) and not is_closing

    def _note(self, picture: ClusterState) -> None:
        for rank in picture.ranks:
            if self._first_step is None and rank.num_marks:
                self._first_step = rank.step
            recent = self._work.setdefault(rank.rank, deque(maxlen=_NUM_RECENT))
            recent.append(rank.cpu >= BUSY_CORES or rank.has_io or rank.state == "R")

    def _takes_its_time(self) -> bool:
        """It begins, evaluates, saves, or some ranks are done and others have something left to do."""
        return self._is_young() or self._is_in(QUIET) or any(map(is_done, self._seen.values()))

    def _is_young(self) -> bool:
        ranks = self._picture.ranks
        if self._is_plain(ranks):
            return self._pace.num_moves < _NUM_FIRST_MOVES
        beats = max((rank.num_marks for rank in ranks), default=0)
        return self._num_steps() < _NUM_FIRST_STEPS and beats < _NUM_FIRST_BEATS

    def _num_steps(self) -> int:
        """Since it is watched. The first one is never typical: much is compiled and allocated in it."""
        ranks = self._picture.ranks
        if not any(rank.step for rank in ranks):
            return self._pace.num_moves // _NUM_FIRST_MOVES
        return max(rank.step for rank in ranks) - (self._first_step or 0)

    def _is_plain(self, ranks: list[RankState]) -> bool:
        """A loop without heartbeats: nobody marks what it does, and only collectives and steps of DDP are seen."""
        return all(rank.num_marks < 2 or rank.phase in OUT for rank in ranks)

    def _is_in(self, phases: tuple[Phase, ...]) -> bool:
        ranks = self._picture.ranks
        if self._is_plain(ranks):
            return False
        return any(rank.phase in phases for rank in ranks if not has_ended(rank))

    def _somebody_works(self) -> bool:
        return any(map(self._is_busy, self._work))

    def _works(self, diagnosis: Diagnosis) -> bool:
        ranks = self._work if diagnosis.rank is None else [diagnosis.rank]
        return diagnosis.cause is Cause.SLOW or any(self._is_busy(rank) for rank in ranks)

    def _is_busy(self, rank: int) -> bool:
        """In most of the last looks; a single tick of work is none."""
        recent = self._work.get(rank, ())
        return bool(recent) and 2 * sum(recent) > len(recent)


def _is_waited_for(diagnosis: Diagnosis) -> bool:
    """By other ranks, or by the user, whose job is done but for its end."""
    return diagnosis.num_blocked > 0 or diagnosis.cause is Cause.TEARDOWN


def _reached(picture: ClusterState) -> tuple[int, int]:
    ranks = picture.ranks
    return max((rank.step for rank in ranks), default=0), max((rank.collective for rank in ranks), default=0)


def _whom(diagnosis: Diagnosis) -> str:
    return diagnosis.host if diagnosis.rank is None else f"rank {diagnosis.rank} on {diagnosis.host}"
