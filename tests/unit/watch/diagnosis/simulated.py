"""A simulated run: ranks take steps in simulated time, synchronize at the end of each backward
pass, and may break.

It gives the states of the cluster that sidecars would observe, and a leader that shows them to a
watchdog.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.watch.cluster_state import ClusterState, Collective, LostNode, NodeState, RankState
from drumline.watch.diagnosis.diagnosis import Alarm, Diagnosis
from drumline.watch.diagnosis.watchdog import Recovery, Watchdog, diagnose
from drumline.watch.heartbeat import Phase
from tests.unit.watch.diagnosis.sample_ranks import IN_BACKWARD

FOR_EVER = math.inf


@dataclass(frozen=True)
class Step:
    """How long each phase takes, by rank where that differs."""

    data_s: float = 0.05
    forward_s: float = 0.1
    backward_s: float = 0.1
    longer: Mapping[tuple[int, Phase], float] = field(default_factory=dict)
    """(rank, phase): its own duration."""
    evaluation_s: float = 0.0
    save_s: float = 0.0
    """Rank 0 saves; the others continue."""


@dataclass(frozen=True)
class Moment:
    at: float
    step: int
    phase: Phase
    cpu: float
    entered: int


Change = Callable[[float], dict[str, Any]]


@dataclass
class Run:
    """`broken`: by rank, when its facts change, and to what (given the seconds since)."""

    lines: list[list[Moment]]
    ranks_per_node: int = 2
    broken: dict[int, tuple[float, Change]] = field(default_factory=dict)
    silent_from: dict[int, float] = field(default_factory=dict)
    """By node."""
    slowdown: float = 1.0
    """Of the last node."""
    unheard_from: dict[int, float] = field(default_factory=dict)
    """By node: since when it is listened for in vain."""

    def cluster(self, now: float, *, closely: bool = False) -> ClusterState:
        # A lost node has the states of its last heartbeat.
        heard_at = [
            min(now, self.silent_from.get(rank // self.ranks_per_node, now))
            for rank in range(len(self.lines))
        ]
        ranks = [self._rank(rank, moment, closely) for rank, moment in enumerate(heard_at)]
        nodes = [
            NodeState(
                node=number,
                host=host_of(number),
                ranks=tuple(ranks[low : low + self.ranks_per_node]),
            )
            for number, low in enumerate(range(0, len(ranks), self.ranks_per_node))
        ]
        nodes[-1] = replace(nodes[-1], slowdown=self.slowdown)
        silent = [
            _silent(node, now - self.silent_from[node.node])
            for node in nodes
            if now - self.silent_from.get(node.node, now) > 1
        ]
        unheard = [
            replace(_silent(node, now - self.unheard_from[node.node]), ranks=())
            for node in nodes
            if now > self.unheard_from.get(node.node, now)
        ]
        away = {host.node for host in unheard}
        return ClusterState(
            me=0,
            nodes=tuple(node for node in nodes if node.node not in away),
            lost=tuple(silent),
            never_seen=tuple(unheard),
        )

    def _rank(self, rank: int, now: float, closely: bool) -> RankState:
        line = self.lines[rank]
        index = bisect.bisect_right(line, now, key=lambda one: one.at) - 1
        here = line[max(index, 0)]
        waits = here.phase is Phase.BACKWARD and here.cpu == 0
        facts = RankState(
            rank=rank,
            host=host_of(rank // self.ranks_per_node),
            pid=4700 + rank,
            step=here.step,
            phase=here.phase,
            num_marks=index + 1,
            collective=here.entered,
            age_s=now - here.at,
            cpu=here.cpu,
            state="R" if here.cpu > 0.5 else "S",
            state_s=now - here.at,
            has_io=here.phase is Phase.SAVE,
        )
        if closely:
            facts = replace(
                facts,
                answers=True,
                stack=IN_BACKWARD if waits else (),
                collectives=flight(here.entered, waits=waits),
            )
        begun, change = self.broken.get(rank, (FOR_EVER, None))
        return replace(facts, **change(now - begun)) if change and now >= begun else facts


def _silent(node: NodeState, no_heartbeat_s: float) -> LostNode:
    return LostNode(
        node=node.node,
        host=node.host,
        ranks=tuple(rank.rank for rank in node.ranks),
        no_heartbeat_s=no_heartbeat_s,
        how="no answer" if no_heartbeat_s > 1 else "",
    )


def flight(entered: int, *, waits: bool) -> tuple[Collective, ...]:
    return tuple(
        Collective(
            group="default_pg",
            number=number,
            op="all_reduce",
            sizes=((77290,),),
            is_done=number < entered or not waits,
        )
        for number in range(max(1, entered - 5), entered + 1)
    )


def host_of(node: int) -> str:
    return f"node-{'abcdef'[node]}"


def simulate(steps: Sequence[Step], *, world_size: int, start_s: float = 1.0) -> list[list[Moment]]:
    """What each rank does when. A phase that never ends blocks the others in their backward
    pass."""
    lines = [[Moment(0.0, 0, Phase.START, 1.0, 0)] for _ in range(world_size)]
    clocks = [start_s] * world_size
    for number, step in enumerate(steps):
        for rank in range(world_size):
            for phase, usual, cpu in (
                (Phase.DATA, step.data_s, 0.0),
                (Phase.FORWARD, step.forward_s, 1.0),
                (Phase.BACKWARD, step.backward_s, 1.0),
            ):
                _enter(lines[rank], clocks[rank], number, phase, cpu, number)
                clocks[rank] += step.longer.get((rank, phase), usual)
            _enter(lines[rank], clocks[rank], number, Phase.BACKWARD, 0.0, number + 1)
        clocks = [max(clocks)] * world_size
        for rank in range(world_size):
            _enter(lines[rank], clocks[rank], number + 1, Phase.BETWEEN, 1.0, number + 1)
            if step.evaluation_s:
                _enter(lines[rank], clocks[rank], number + 1, Phase.EVALUATION, 1.0, number + 1)
                clocks[rank] += step.evaluation_s
            if step.save_s and rank == 0:
                _enter(lines[rank], clocks[rank], number + 1, Phase.SAVE, 0.1, number + 1)
                clocks[rank] += step.save_s
    for rank in range(world_size):
        _enter(lines[rank], clocks[rank], len(steps), Phase.LEFT, 0.0, len(steps))
    return lines


def _enter(
    line: list[Moment], at: float, step: int, phase: Phase, cpu: float, entered: int
) -> None:
    if at < FOR_EVER:
        line.append(Moment(at, step, phase, cpu, entered))


@dataclass(frozen=True)
class Said:
    at: float
    alarm: Alarm
    diagnosis: Diagnosis


def watch(
    run: Run,
    *,
    until: float,
    hang_s: float = 60.0,
    gather_s: float = 1.0,
    watchdog: Watchdog | None = None,
) -> tuple[list[Said], list[Recovery], list[float]]:
    """The diagnoses of a leader, what happened after each, and when it collected evidence."""
    watchdog = watchdog or Watchdog(hang_s=hang_s, world_size=len(run.lines))
    alarms = []
    recoveries = []
    gathered = []
    now = 0.0
    while now < until:
        recovery = watchdog.observe(run.cluster(now), now)
        if recovery is not None:
            recoveries.append(recovery)
        elif watchdog.wants_evidence:
            gathered.append(now)
            inspected = run.cluster(now, closely=True)
            now += gather_s
            by_now = run.cluster(now)
            diagnosis = diagnose(replace(inspected, lost=by_now.lost, never_seen=by_now.never_seen))
            if (
                alarm := watchdog.decide(diagnosis, run.cluster(now), now)
            ) is not None and diagnosis is not None:
                alarms.append(Said(now, alarm, diagnosis))
        now += 0.5
    return alarms, recoveries, gathered


def end_of(run: Run) -> float:
    return max(line[-1].at for line in run.lines)
