"""All that a rank started: its DataLoader workers, and how much CPU the whole lot uses."""

from __future__ import annotations

import os

from drumline.watch.facts import WorkerFacts
from drumline.watch.sidecar import procfs
from drumline.watch.sidecar.procfs import GONE, TICKS_PER_S, Stat

# A rank may have hundreds of threads, each with a list of its own of what it started.
SEARCH_EVERY_S = 15.0
COUNT_EVERY_S = 1.0
# torch gives this name to every worker that it starts, also to those that are no forks of the rank.
WORKER_NAME = "pt_data_worker"


class Descendants:
    """Looked for now and then: a rank that moves needs none of this, and one that does not can wait a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids: tuple[int, ...] = ()
        self._searched_s = self._counted_s = float("-inf")
        self._stats: dict[int, Stat] = {}
        self._cores: dict[int, float] = {}
        self._moved: dict[int, int | None] = {}
        self.has_io = False
        """Whether a worker read or wrote files between the last two counts."""

    def cores(self, now_s: float) -> float:
        """Cores that they used between the last two counts, of which there is one a second at most."""
        if now_s - self._counted_s >= COUNT_EVERY_S:
            self._count(now_s)
        return sum(self._cores.values())

    def workers(self, now_s: float) -> tuple[WorkerFacts, ...]:
        """Who loads data for the rank, in the order in which they were started."""
        self._search(now_s)
        stats = {pid: stat for pid in self._pids if (stat := procfs.read_stat(pid))}
        mine = sorted((stat.start, pid) for pid, stat in stats.items() if self._is_worker(stat))
        return tuple(
            WorkerFacts(number=number, pid=pid, state=stats[pid].state, cpu=self._cores.get(pid, 0.0))
            for number, (_, pid) in enumerate(mine)
        )

    def forgive(self) -> None:
        """What they wrote to answer a question does not count as their work."""
        self._moved = {pid: procfs.moved_bytes(pid) for pid in self._moved}

    def _is_worker(self, stat: Stat) -> bool:
        return stat.name == WORKER_NAME or (stat.parent == self._pid and stat.is_fork)

    def _search(self, now_s: float) -> None:
        """Children of children too; not the sidecar, which local rank 0 has started, and what that starts."""
        self._searched_s = now_s
        found: list[int] = []
        new = [self._pid]
        while new:
            new = [child for pid in new for child in procfs.children(pid) if child != os.getpid()]
            found += new
        self._pids = tuple(found)

    def _count(self, now_s: float) -> None:
        if now_s - self._searched_s >= SEARCH_EVERY_S:
            self._search(now_s)
        stats = {pid: stat for pid in self._pids if (stat := procfs.read_stat(pid))}
        moved = {pid: procfs.moved_bytes(pid) for pid in stats}
        elapsed_ticks = (now_s - self._counted_s) * TICKS_PER_S
        known = {
            pid: stat for pid, stat in self._stats.items() if pid in stats and stats[pid].start == stat.start
        }
        self._cores = {pid: (stats[pid].ticks - old.ticks) / elapsed_ticks for pid, old in known.items()}
        self.has_io = any(moved[pid] != self._moved.get(pid) for pid in known)
        self._stats, self._moved, self._counted_s = stats, moved, now_s


def refreshed(worker: WorkerFacts, stack: tuple[str, ...]) -> WorkerFacts:
    """The same worker as it is now."""
    stat = procfs.read_stat(worker.pid)
    state = stat.state if stat else GONE
    return WorkerFacts(number=worker.number, pid=worker.pid, state=state, cpu=worker.cpu, stack=stack)
