"""The process of a rank and all that it started: their state, how much CPU they use, and whether they read or write."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from drumline.processes import GONE, TICKS_PER_S, ProcessHandle, ProcessStat, children, io_bytes, read_stat, state_of
from drumline.watch.cluster_state import WorkerState
from drumline.watch.sidecar.kernel_evidence import OutOfMemoryCheck

# Observations that follow each other faster say nothing new of CPU time, which is counted in hundredths of a second.
MIN_INTERVAL_S = 0.1
# What a rank without progress uses is measured over so long: where others compute too, it gets the CPU now and then.
MEASURED_S, MIN_MEASURED_S = 2.0, 0.8
# Observations that are further apart than this have not seen what was in between.
LATE_S = 1.0
# A rank may have hundreds of threads, each with a list of its own of what it started.
SEARCH_EVERY_S = 15.0
COUNT_EVERY_S = 1.0


class RankProcess:
    """Its state, and what it used since the last observation."""

    def __init__(self, pid: int) -> None:
        self.handle = ProcessHandle(pid)
        self.memory = OutOfMemoryCheck(pid)
        self.descendants = Descendants(pid)
        self.state, self.state_since_s, self._observed_s = "", 0.0, math.inf
        self.exit: int | None = None
        self.cpu, self.has_io = 0.0, False
        self._readings: list[tuple[float, int, int | None]] = []
        """When, CPU time, and bytes read and written; the newest last."""

    def observe(self, now_s: float, *, is_still: bool) -> None:
        """`is_still`: the rank has shown no progress for a while."""
        stat = self.handle.stat()
        state = stat.state if stat else GONE
        if state != self.state:
            self.state, self.state_since_s = state, now_s
        # While this process was stopped itself, with the whole job perhaps, it has seen no state.
        self.state_since_s += max(0.0, now_s - self._observed_s - LATE_S)
        self._observed_s = now_s
        if stat is None or state == "Z":
            self.cpu, self.has_io = 0.0, False
            if stat and (stat.exit_status or stat.num_threads <= 1):
                self.exit = os.waitstatus_to_exitcode(stat.exit_status)
            return
        if not self._readings or now_s - self._readings[-1][0] >= MIN_INTERVAL_S:
            self._measure(stat, now_s, is_still=is_still)

    def skip_answer(self, now_s: float) -> None:
        """What the rank did to answer a question does not count as its work."""
        if stat := self.handle.stat():
            self._readings = [(now_s, stat.cpu_ticks, io_bytes(self.handle.pid))]
        self.descendants.skip_answer()

    def _measure(self, stat: ProcessStat, now_s: float, *, is_still: bool) -> None:
        # A rank that makes progress works, whatever its files and its workers do.
        moved = io_bytes(self.handle.pid) if is_still else None
        self._readings = [*(self._readings if is_still else self._readings[-1:]), (now_s, stat.cpu_ticks, moved)]
        while len(self._readings) > 2 and now_s - self._readings[1][0] >= MEASURED_S:
            del self._readings[0]
        begin_s, ticks, _ = self._readings[0]
        measured_s = now_s - begin_s
        if not measured_s or (is_still and measured_s < MIN_MEASURED_S):
            return
        self.cpu = (stat.cpu_ticks - ticks) / (measured_s * TICKS_PER_S)
        self.has_io = len({num_bytes for *_, num_bytes in self._readings if num_bytes is not None}) > 1
        if is_still:
            self.cpu += self.descendants.cores(now_s)
            self.has_io |= self.descendants.has_io


class Descendants:
    """All that a rank started. Searched now and then: a rank that makes progress needs none of this, and one that does
    not can wait a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids: list[int] = []
        self._searched_s = self._counted_s = float("-inf")
        self._stats: dict[int, ProcessStat] = {}
        self._cores: dict[int, float] = {}
        self._io_bytes: dict[int, int | None] = {}
        self.has_io = False  # whether one of them read or wrote files between the last two counts

    def cores(self, now_s: float) -> float:
        """That they used between the last two counts, of which there is one a second at most."""
        if now_s - self._counted_s >= COUNT_EVERY_S:
            self._count(now_s)
        return sum(self._cores.values())

    def workers(self, reported: Iterable[tuple[int, int]]) -> tuple[WorkerState, ...]:
        """Which of them load data; `reported`: numbers and pids, by the rank itself."""
        return tuple(
            WorkerState(number=number, pid=pid, state=state_of(pid), cpu=self._cores.get(pid, 0.0))
            for number, pid in reported
        )

    def skip_answer(self) -> None:
        self._io_bytes = {pid: io_bytes(pid) for pid in self._io_bytes}

    def _count(self, now_s: float) -> None:
        if now_s - self._searched_s >= SEARCH_EVERY_S:
            self._searched_s, self._pids, new = now_s, [], [self._pid]
            # Not the sidecar, which the first rank has started.
            while new := [child for pid in new for child in children(pid) if child != os.getpid()]:
                self._pids += new
        stats = {pid: stat for pid in self._pids if (stat := read_stat(pid))}
        moved = {pid: io_bytes(pid) for pid in stats}
        elapsed_ticks = (now_s - self._counted_s) * TICKS_PER_S
        known = {
            pid: old for pid, old in self._stats.items() if pid in stats and stats[pid].start_ticks == old.start_ticks
        }
        self._cores = {pid: (stats[pid].cpu_ticks - old.cpu_ticks) / elapsed_ticks for pid, old in known.items()}
        self.has_io = any(moved[pid] != self._io_bytes.get(pid) for pid in known)
        self._stats, self._io_bytes, self._counted_s = stats, moved, now_s
