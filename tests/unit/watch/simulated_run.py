"""A run on paper: ranks that step together, wait for each other in backward, and leave beats; no
process, no time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from drumline.watch.cluster_state import ClusterState, NodeState, RankState
from drumline.watch.heartbeat import Phase

Work = Callable[[int, int, Phase], float]
"""How long this rank's own work takes in this step and phase."""


@dataclass
class SimulatedRun:
    """`hosts`: of every rank. A collective is in backward and, every `log_every` steps, between
    steps."""

    hosts: Sequence[str]
    work: Work
    num_steps: int
    log_every: int = 10
    save_every: int = 0
    compiles: bool = False
    """Whether each step also has a phase in which torch compiles."""
    waits_in: Phase = Phase.BACKWARD
    """Where the CPU of a rank is held up by the others: on CUDA not where the collective is."""
    marks: list[list[tuple[float, Phase, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks = [[(0.0, Phase.START, 0)] for _ in self.hosts]
        clocks = [3.0 for _ in self.hosts]
        for step in range(self.num_steps):
            for phase in (
                Phase.DATA,
                *[Phase.COMPILE][: self.compiles],
                Phase.FORWARD,
                Phase.BACKWARD,
            ):
                self._work(clocks, step, phase)
            self._wait(clocks, step, self.waits_in)
            self._work(clocks, step, Phase.OPTIMIZER)
            step += 1
            self._work(clocks, step, Phase.BETWEEN)
            if step % self.log_every == 0:
                self._wait(clocks, step, Phase.BETWEEN)
            if self.save_every and step % self.save_every == 0:
                self._mark(0, clocks[0], Phase.SAVE, step)
                # on rank 0 alone: the others are in backward meanwhile
                clocks[0] += 2.0
        self.seconds = max(clocks)
        self._spent = [list(_spent_until(marks)) for marks in self.marks]

    def pictures(
        self, every_s: float = 0.5, lag_s: Callable[[str], float] = lambda host: 0.0
    ) -> Iterator[tuple[float, ClusterState]]:
        """`lag_s`: how old what is known of a host is."""
        hosts = sorted(set(self.hosts))
        for number in range(1, int(self.seconds / every_s)):
            now = number * every_s
            observed_at = {host: max(0.0, now - lag_s(host)) for host in hosts}
            ranks = [self._facts(rank, observed_at[host]) for rank, host in enumerate(self.hosts)]
            nodes = [
                NodeState(
                    node=node, host=host, ranks=tuple(rank for rank in ranks if rank.host == host)
                )
                for node, host in enumerate(hosts)
            ]
            yield now, ClusterState(me=0, nodes=tuple(nodes))

    def _mark(self, rank: int, time: float, phase: Phase, step: int) -> None:
        self.marks[rank].append((time, phase, step))

    def _work(self, clocks: list[float], step: int, phase: Phase) -> None:
        for rank in range(len(clocks)):
            self._mark(rank, clocks[rank], phase, step)
            clocks[rank] += self.work(rank, step, phase)

    def _wait(self, clocks: list[float], step: int, phase: Phase) -> None:
        for rank in range(len(clocks)):
            self._mark(rank, clocks[rank], phase, step)
            clocks[rank] = max(clocks)

    def _facts(self, rank: int, now: float) -> RankState:
        marks = self.marks[rank]
        last = bisect_right(marks, now, key=lambda mark: mark[0]) - 1
        begin, phase, step = marks[last]
        return RankState(
            rank=rank,
            host=self.hosts[rank],
            pid=100 + rank,
            step=step,
            phase=phase,
            age_s=now - begin,
            spent_s=self._spent[rank][last],
        )


def _spent_until(marks: Sequence[tuple[float, Phase, int]]) -> Iterator[tuple[float, ...]]:
    """At each mark: by phase, all that went before it."""
    spent = [0.0] * len(Phase)
    yield tuple(spent)
    for (begin, phase, _), (end, *_) in pairwise(marks):
        spent[phase] += end - begin
        yield tuple(spent)
