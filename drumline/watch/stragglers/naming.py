"""Stragglers: ranks and hosts that take longer for their own work than their peers, and in what. Pure reasoning.

All ranks end a step together, so all of them take equally long for it: a slow rank cannot be told by its steps, only by
what it does in them while the others wait. What is seen:

- **data** never waits for another rank. Neither do **forward** and **optimizer** on a CPU. A rank that is longer in
  them is slow, and its peers have as much more of backward, where they wait for it.
- **between** steps is host code, and sometimes a collective (a log line, the comparison of replicas) in which a rank
  may wait for one that was slow in its optimizer. So an excess there counts only where the rank does not make up for it
  in a phase that is surer: see TRUST.
- **backward**, and **user**, which is all of a user's own loop but its data, hold both work and waiting, in one number.
  One that is slow in nothing but backward is *not* seen: all ranks then show the same long backward.

On CUDA the CPU only hands out work: forward and backward are launches there, and waiting for the device may show in any
of forward, backward and between (with SyncBatchNorm waiting for other ranks too, in forward). By the same rule it is
not taken for slowness, data and host code are told truly, and a slow GPU is not seen here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from drumline.watch.beats.phase import Phase
from drumline.watch.facts import Picture
from drumline.watch.stragglers.slices import Slice, Slices, together
from drumline.watch.stragglers.straggler import Loss, Straggler, over, slow_host, slow_rank

TRUST = ((Phase.DATA,), (Phase.FORWARD, Phase.OPTIMIZER), (Phase.BETWEEN,))
"""The surest first."""
COSTS = 0.05
"""Of a step: below that nobody wins much by knowing."""
FEWEST_SLICES, FEWEST_STEPS = 6, 20
"""Of a window, in all but a sixth of whose slices it has to be slow: a slow step, however slow, is in one or two."""
WINDOWS = ((2.5, 2.0), (10.0, 1.0))
"""(seconds, times the factor): who is much slower is named soon. What is near the limit may be the chance of a few
seconds, on a machine that others use too."""
MOST_SLICES = 26
UNTIL_OVER = 16
Losses = Mapping[int, Mapping[Phase, tuple[float, float]]]


class Stragglers:
    """Looks at each picture of a run, and tells of every straggler once until it is over."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._slices = Slices()
        self._seen: deque[tuple[Slice, Losses]] = deque(maxlen=MOST_SLICES)
        self._told: dict[tuple[str, int | None], _Told] = {}

    def look(self, picture: Picture, now: float) -> list[Straggler]:
        """Those that have just become stragglers, or just ceased to be."""
        hosts = {facts.rank: facts.host for facts in picture.ranks}
        found = self._slices.look(picture)
        if found is None or len(hosts) < 2:
            return []
        if self._seen and self._seen[-1][0].parts.keys() != found.parts.keys():
            self._seen.clear()  # other ranks than before: the job was started anew
        self._seen.append((found, losses(found, factor=self._factor)))
        return [*self._name(hosts, now), *self._end(found, hosts, now)]

    def _name(self, hosts: Mapping[int, str], now: float) -> list[Straggler]:
        slow: dict[int, Loss] = {}
        for seconds, times in WINDOWS:
            if window := self._window(seconds):
                slow = self._slow_throughout(window, times * self._factor) | slow
        named = []
        for rank in slow:
            host = hosts[rank]
            if {(host, rank), (host, None)} & self._told.keys():
                continue
            siblings = [other for other in hosts if hosts[other] == host]
            is_host = 1 < len(siblings) < len(hosts) and all(sibling in slow for sibling in siblings)
            straggler = (
                slow_host(_mean([slow[sibling] for sibling in siblings]), host=host)
                if is_host
                else slow_rank(slow[rank], host=host, rank=rank)
            )
            self._told[host, straggler.rank] = _Told(now)
            named.append(straggler)
        return named

    def _window(self, fewest_s: float) -> list[tuple[Slice, Losses]]:
        """The latest slices, as many as it takes to judge; none when there are not enough yet."""
        window: list[tuple[Slice, Losses]] = []
        steps = seconds = 0.0
        for entry in reversed(self._seen):
            window.append(entry)
            steps, seconds = steps + entry[0].num_steps, seconds + entry[0].seconds
            if len(window) >= FEWEST_SLICES and steps >= FEWEST_STEPS and seconds >= fewest_s:
                return window
        return []

    def _slow_throughout(self, window: Sequence[tuple[Slice, Losses]], factor: float) -> dict[int, Loss]:
        """The ranks that were slow in one phase in nearly every slice, and in all of them together."""
        times = Counter(
            (rank, phase) for _, slow in window for rank, phases in slow.items() for phase in phases
        )
        often = {entry for entry, count in times.items() if count >= len(window) - len(window) // 6}
        if not often:
            return {}
        slow = losses(together([one for one, _ in window]), factor=factor)
        borne_out = {
            rank: {phase: both for phase, both in phases.items() if (rank, phase) in often}
            for rank, phases in slow.items()
        }
        return {rank: _loss(phases) for rank, phases in borne_out.items() if phases}

    def _end(self, found: Slice, hosts: Mapping[int, str], now: float) -> list[Straggler]:
        if not self._told:
            return []
        # Half way back is not over: or one at the limit would come and go.
        slow = losses(found, factor=1 + (self._factor - 1) / 2, costs=COSTS / 2)
        ended = []
        for (host, rank), told in list(self._told.items()):
            ranks = [one for one in hosts if hosts[one] == host and rank in (None, one)]
            told.quiet = max(0, told.quiet - 2) if slow.keys() & set(ranks) else told.quiet + 1
            if told.quiet >= UNTIL_OVER:
                del self._told[host, rank]
                ended.append(over(host=host, rank=rank, seconds=now - told.since))
        return ended


@dataclass
class _Told:
    """A straggler that was named."""

    since: float
    quiet: int = 0
    """Slices in which it was not slow."""


def losses(found: Slice, *, factor: float, costs: float = COSTS) -> Losses:
    """The ranks that lost their peers a noticeable part of this slice by being `factor` times as long in a phase, and
    what they and their peers took for it, in seconds a step."""
    least = costs * found.in_steps
    seconds = found.seconds / found.num_steps
    slow: dict[int, dict[Phase, tuple[float, float]]] = {}
    surer: tuple[Phase, ...] = ()
    for level in TRUST:
        surer += level
        in_all = _against_peers(found, surer)
        for phase in level:
            for rank, (own, peers) in _against_peers(found, (phase,)).items():
                excess, borne_out = own - peers, in_all[rank][0] - in_all[rank][1]
                if excess >= least and own >= factor * peers and borne_out >= excess / 2:
                    slow.setdefault(rank, {})[phase] = own * seconds, peers * seconds
    return slow


def _loss(by_phase: Mapping[Phase, tuple[float, float]]) -> Loss:
    """In the phase that costs most, and in those beside which it is not alone."""
    costliest = sorted(by_phase.items(), key=lambda entry: entry[1][1] - entry[1][0])
    most = costliest[0][1][0] - costliest[0][1][1]
    counted = {phase: (own, peers) for phase, (own, peers) in costliest if own - peers >= most / 3}
    own_s, peers_s = (sum(both) for both in zip(*counted.values(), strict=True))
    return Loss(tuple(counted), own_s, peers_s)


def _mean(of_ranks: Sequence[Loss]) -> Loss:
    worst = max(of_ranks, key=lambda loss: loss.lost_s)
    return Loss(worst.phases, mean(one.own_s for one in of_ranks), mean(one.peers_s for one in of_ranks))


def _against_peers(found: Slice, phases: Sequence[Phase]) -> dict[int, tuple[float, float]]:
    """By rank: the part of the time that it spent in these phases, and the median of all others."""
    own = {rank: sum(parts[phase] for phase in phases) for rank, parts in found.parts.items()}
    ordered = sorted(own.values())
    return {rank: (value, _median_without(ordered, value)) for rank, value in own.items()}


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Of a sorted list, this value of it left out."""
    place = bisect_left(ordered, value)
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
