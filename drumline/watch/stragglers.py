"""Stragglers: ranks and hosts whose own work in a step takes longer than that of their peers, and
in which phase.

All ranks finish a step together, so step times do not show which one is slow. The run is divided
into slices of a step or more, and in each slice the fraction of time per phase is compared across
ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from drumline.watch.cluster_state import ClusterState, RankState
from drumline.watch.heartbeat import Phase

# The most reliable first. Data never waits for another rank, nor do forward and optimizer on a CPU.
# Between steps there may be a collective, and on CUDA any phase may wait for the device: an excess
# counts only if more reliable phases do not compensate for it. Backward and user mix work and
# waiting: a rank that is slow only there is not found.
RELIABILITY = (
    (Phase.DATA,),
    (Phase.FORWARD, Phase.OPTIMIZER),
    (Phase.BETWEEN,),
)

# the least fraction of a step that a straggler must cost to be reported
MIN_COST = 0.05
MIN_SLICES = 6
MIN_STEPS = 20
"""The smallest window. A straggler is slow in 5 of 6 of its slices: a single slow step affects one
or two."""

WINDOWS = ((2.5, 2.0), (10.0, 1.0))
"""(seconds, multiple of the factor): a much slower rank is reported sooner. Near the limit it may
be chance, on a busy machine."""

MAX_SLICES = 26
FORGET_S = 600.0
IN_STEPS = (
    Phase.DATA,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.BETWEEN,
    Phase.USER,
)
"""Evaluations and saves do not count: rank 0 does more of them than the others."""

SLICE_STEPS = 1
SLICE_S = 0.4

# In the first steps libraries are loaded, kernels chosen and buffers allocated.
FIRST_STEPS = 5
MAX_FACTOR = 100
_PHASE_NAMES = {
    Phase.DATA: "data",
    Phase.FORWARD: "forward",
    Phase.OPTIMIZER: "optimizer",
    Phase.BETWEEN: "host code between steps",
}
_CHECK_HOST = "check what else runs on {host}, its clock speed and temperature; drumline doctor compares hosts"
_NEXT_STEPS = {
    Phase.DATA: "check the storage that {host} reads from, its DataLoader workers (data.workers), and what else runs "
    "there",
    Phase.FORWARD: _CHECK_HOST,
    Phase.OPTIMIZER: _CHECK_HOST,
    Phase.BETWEEN: "check what this rank does between steps that the others do not: logs, trackers, callbacks",
}


@dataclass(frozen=True, slots=True)
class TimeAgainstPeers:
    """The time of a rank and of its peers: fractions of a slice, or seconds per step."""

    rank: float
    peers: float

    @property
    def excess(self) -> float:
        """What the rank loses against its peers."""
        return self.rank - self.peers


SlowRanks = Mapping[int, Mapping[Phase, TimeAgainstPeers]]
"""By rank and phase, in seconds per step."""


@dataclass(frozen=True)
class Straggler:
    """A rank or a host that became a straggler."""

    host: str
    rank: int | None
    """None: all ranks of the host."""

    phase: Phase
    """In which it loses most against its peers."""

    seconds: TimeAgainstPeers
    """Per step."""

    @property
    def factor(self) -> float:
        """How many times as long it takes."""
        return self.seconds.rank / max(self.seconds.peers, 1e-9)

    @property
    def what(self) -> str:
        """`rank 3 on gpu-02 takes 2.1x as long as its peers in data (40 ms per step, ...`."""
        times = f"{self.factor:.1f}x" if self.factor < MAX_FACTOR else f"over {MAX_FACTOR}x"
        rank_ms = _ms(self.seconds.rank)
        peers_ms = _ms(self.seconds.peers)
        who = f"rank {self.rank} on {self.host} takes {times} as long as its peers"
        if self.rank is None:
            who = f"all ranks on {self.host} take {times} as long as their peers"

        return (
            f"{who} in {_PHASE_NAMES[self.phase]} ({rank_ms} per step, peers {peers_ms}), "
            f"which costs the run {self.seconds.excess:.2g} s per step"
        )

    @property
    def sentence(self) -> str:
        """The same, with what to do."""
        return f"straggler: {self.what}. Try: {_NEXT_STEPS[self.phase].format(host=self.host)}"


class Stragglers:
    """Follows a run, and reports each straggler once, until it was not slow for FORGET_S."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._first: dict[int, RankState] = {}
        """The ranks as they were first seen since their start."""

        self._begin: dict[int, RankState] = {}
        """The ranks at the beginning of the current slice; empty: it has not begun."""

        self._seen: deque[TimeSlice] = deque(maxlen=MAX_SLICES)
        """The latest slices."""

        self._reported: dict[tuple[str, int | None], float] = {}
        """When it was last slow."""

    def observe(self, cluster: ClusterState, now: float) -> list[Straggler]:
        """Ranks and hosts that just became stragglers."""
        hosts = {facts.rank: facts.host for facts in cluster.ranks}
        time_slice = self._next_slice(cluster)
        if time_slice is None or len(hosts) < 2:
            return []

        if self._seen and self._seen[-1].fractions.keys() != time_slice.fractions.keys():
            self._seen.clear()  # other ranks than before: the job was restarted

        slow = slow_ranks(time_slice, factor=self._factor)
        self._seen.append(replace(time_slice, slow=slow))
        return self._find(hosts, now)

    def _next_slice(self, cluster: ClusterState) -> TimeSlice | None:
        """A slice, when one ends here. Ranks take their steps together, so a rank that spends less
        time in one phase spends more in another: fractions of the same seconds are comparable
        wherever the steps begin and end."""
        now = {facts.rank: facts for facts in cluster.ranks if facts.spent_s}
        if self._were_restarted(now):
            self._first = now
            self._begin = {}

        begin = self._begin or self._first
        steps = [facts.step - begin[rank].step for rank, facts in now.items()]
        if not self._begin:
            if min(steps, default=0) >= FIRST_STEPS:
                self._begin = now
            return None

        spent = {rank: _spent(begin[rank], facts) for rank, facts in now.items()}
        seconds = [sum(by_phase) for by_phase in spent.values()]
        if min(steps) < SLICE_STEPS or min(seconds) < SLICE_S:
            return None

        self._begin = now
        fractions = {
            rank: tuple(phase_s / sum(by_phase) for phase_s in by_phase)
            for rank, by_phase in spent.items()
        }
        return TimeSlice(median(seconds), median(steps), fractions)

    def _were_restarted(self, now: Mapping[int, RankState]) -> bool:
        """Whether these are not the ranks that were seen first."""
        first = self._first
        return first.keys() != now.keys() or any(
            first[rank].pid != facts.pid or first[rank].step > facts.step
            for rank, facts in now.items()
        )

    def _find(self, hosts: Mapping[int, str], now: float) -> list[Straggler]:
        """The ranks and hosts that are slow now and were not reported recently."""
        slow: dict[int, tuple[Phase, TimeAgainstPeers]] = {}
        for seconds, times in WINDOWS:
            if window := self._window(seconds):
                slow = self._slow_throughout(window, times * self._factor) | slow

        stragglers = []
        for rank in slow:
            host = hosts[rank]
            if self._was_reported(host, rank, now):
                continue

            siblings = {peer for peer in hosts if hosts[peer] == host}
            is_host = 1 < len(siblings) < len(hosts) and siblings <= slow.keys()
            straggler = Straggler(host, None if is_host else rank, *slow[rank])
            self._reported[host, straggler.rank] = now
            stragglers.append(straggler)

        return stragglers

    def _was_reported(self, host: str, rank: int, now: float) -> bool:
        """Whether this rank, or all of its host, was reported and has been slow since."""
        is_reported = False
        for who in (rank, None):
            if now - self._reported.get((host, who), -math.inf) < FORGET_S:
                self._reported[host, who] = now
                is_reported = True
        return is_reported

    def _window(self, min_s: float) -> list[TimeSlice]:
        """The latest slices, as many as a decision needs; empty if there are not enough yet."""
        window: list[TimeSlice] = []
        steps = 0.0
        seconds = 0.0
        for past in reversed(self._seen):
            window.append(past)
            steps += past.num_steps
            seconds += past.seconds
            if len(window) >= MIN_SLICES and steps >= MIN_STEPS and seconds >= min_s:
                return window

        return []

    def _slow_throughout(
        self, window: Sequence[TimeSlice], factor: float
    ) -> dict[int, tuple[Phase, TimeAgainstPeers]]:
        """The ranks that were slow in one phase in nearly every slice, and over all of them
        together; each with the phase in which it loses most."""
        times = Counter(
            (rank, phase)
            for past in window
            for rank, phases in past.slow.items()
            for phase in phases
        )
        most = len(window) - len(window) // 6
        often = {entry for entry, count in times.items() if count >= most}
        if not often:
            return {}

        slow_phases = {}
        for rank, phases in slow_ranks(_joined(window), factor=factor).items():
            confirmed = [phase for phase in phases if (rank, phase) in often]
            if confirmed:
                worst = max(confirmed, key=lambda phase: phases[phase].excess)
                slow_phases[rank] = (worst, phases[worst])

        return slow_phases


def slow_ranks(time_slice: TimeSlice, *, factor: float) -> SlowRanks:
    """The ranks that take `factor` times as long in a phase as others, and so cost a noticeable
    part of this slice."""
    by_ranks = time_slice.fractions.values()
    in_steps = median(sum(by_phase[phase] for phase in IN_STEPS) for by_phase in by_ranks)
    least = MIN_COST * in_steps
    seconds = time_slice.seconds / time_slice.num_steps
    slow: dict[int, dict[Phase, TimeAgainstPeers]] = {}

    # A rank that compiles is not slow, and those that wait for it are not either.
    reliable: tuple[Phase, ...] = (Phase.COMPILE,)
    for level in RELIABILITY:
        reliable += level
        in_all = _against_peers(time_slice, reliable)
        for phase in level:
            for rank, times in _against_peers(time_slice, (phase,)).items():
                is_slow = times.excess >= least and times.rank >= factor * times.peers
                if is_slow and in_all[rank].excess >= times.excess / 2:
                    in_seconds = TimeAgainstPeers(times.rank * seconds, times.peers * seconds)
                    slow.setdefault(rank, {})[phase] = in_seconds

    return slow


def _against_peers(time_slice: TimeSlice, phases: Sequence[Phase]) -> dict[int, TimeAgainstPeers]:
    """By rank: the fraction of time that it spent in these phases, and the median of all others."""
    spent = {
        rank: sum(fractions[phase] for phase in phases)
        for rank, fractions in time_slice.fractions.items()
    }

    ordered = sorted(spent.values())
    low = (len(ordered) - 2) // 2
    high = (len(ordered) - 1) // 2

    def median_without(value: float) -> float:
        place = bisect_left(ordered, value)
        return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2

    return {rank: TimeAgainstPeers(value, median_without(value)) for rank, value in spent.items()}


@dataclass(frozen=True)
class TimeSlice:
    """Some seconds of a run in which every rank took a step or more."""

    seconds: float
    num_steps: float
    fractions: Mapping[int, tuple[float, ...]]
    """By rank, then by phase."""

    slow: SlowRanks = field(default_factory=dict)


def _spent(begin: RankState, end: RankState) -> list[float]:
    """The time spent, by phase. Never negative: a heartbeat that is read while it is written may be
    off by a phase."""

    def totals(facts: RankState) -> list[float]:
        spent = list(facts.spent_s)
        spent[facts.phase] += facts.age_s  # what the heartbeat does not count yet
        return spent

    return [max(0.0, late - early) for early, late in zip(totals(begin), totals(end), strict=True)]


def _joined(slices: Sequence[TimeSlice]) -> TimeSlice:
    """Several slices of the same ranks as one."""
    seconds = sum(part.seconds for part in slices)
    num_steps = sum(part.num_steps for part in slices)

    fractions = {}
    for rank in slices[0].fractions:
        weighted = [
            [fraction * part.seconds for fraction in part.fractions[rank]] for part in slices
        ]
        fractions[rank] = tuple(sum(of_phase) / seconds for of_phase in zip(*weighted, strict=True))

    return TimeSlice(seconds, num_steps, fractions)


def _ms(seconds: float) -> str:
    """`12 ms`, `3.4 ms`."""
    digits = 0 if seconds >= 0.01 else 1
    return f"{seconds * 1000:.{digits}f} ms"
