"""All that a rank started, and how much CPU that uses; which of it are DataLoader workers the rank itself says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from drumline.processes import TICKS_PER_S, ProcessStat, children, io_bytes, read_stat, state_of
from drumline.watch.facts import WorkerFacts
from drumline.watch.sidecar.stacks import in_fork_s

# A rank may have hundreds of threads, each with a list of its own of what it started.
SEARCH_EVERY_S = 15.0
COUNT_EVERY_S = 1.0


class Descendants:
    """Looked for now and then: a rank that moves needs none of this, and one that does not can wait a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids: tuple[int, ...] = ()
        self._searched_s = self._counted_s = float("-inf")
        self._stats: dict[int, ProcessStat] = {}
        self._cores: dict[int, float] = {}
        self._moved: dict[int, int | None] = {}
        self.has_io = False
        """Whether a worker read or wrote files between the last two counts."""

    def cores(self, now_s: float) -> float:
        """Cores that they used between the last two counts, of which there is one a second at most."""
        if now_s - self._counted_s >= COUNT_EVERY_S:
            self._count(now_s)
        return sum(self._cores.values())

    def workers(self, told: Iterable[tuple[int, int]]) -> tuple[WorkerFacts, ...]:
        """Who loads data for the rank. `told`: by the rank, their numbers and processes."""
        return tuple(
            WorkerFacts(number=number, pid=pid, state=state_of(pid), cpu=self._cores.get(pid, 0.0))
            for number, pid in told
        )

    def forgive(self) -> None:
        """What they wrote to answer a question does not count as their work."""
        self._moved = {pid: io_bytes(pid) for pid in self._moved}

    def _search(self, now_s: float) -> None:
        """Children of children too; not the sidecar, which local rank 0 has started, and what that starts."""
        self._searched_s = now_s
        found: list[int] = []
        new = [self._pid]
        while new:
            new = [child for pid in new for child in children(pid) if child != os.getpid()]
            found += new
        self._pids = tuple(found)

    def _count(self, now_s: float) -> None:
        if now_s - self._searched_s >= SEARCH_EVERY_S:
            self._search(now_s)
        stats = {pid: stat for pid in self._pids if (stat := read_stat(pid))}
        moved = {pid: io_bytes(pid) for pid in stats}
        elapsed_ticks = (now_s - self._counted_s) * TICKS_PER_S
        known = {
            pid: stat
            for pid, stat in self._stats.items()
            if pid in stats and stats[pid].start_ticks == stat.start_ticks
        }
        self._cores = {
            pid: (stats[pid].cpu_ticks - old.cpu_ticks) / elapsed_ticks for pid, old in known.items()
        }
        self.has_io = any(moved[pid] != self._moved.get(pid) for pid in known)
        self._stats, self._moved, self._counted_s = stats, moved, now_s


def refreshed(worker: WorkerFacts, stack: tuple[str, ...]) -> WorkerFacts:
    """The same worker as it is now."""
    return replace(worker, state=state_of(worker.pid), in_fork_s=in_fork_s(worker.pid), stack=stack)
