"""Observes one rank of this node. `observe` is a few reads of /proc, five times a second; `inspect`
asks the rank for its report, and takes at most a second and a half, whatever the rank does."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from drumline.base import processes
from drumline.base.processes import (
    EXITED,
    STOPPED,
    TICKS_PER_S,
    ProcessHandle,
    ProcessStat,
    ThreadTimes,
    io_bytes,
    read_stat,
    state_of,
    thread_times,
)
from drumline.watch.cluster_state import RankState, WorkerState
from drumline.watch.heartbeat import Heartbeat, read_heartbeat
from drumline.watch.self_report import WORKER_SIGNAL
from drumline.watch.sidecar import ask_rank
from drumline.watch.sidecar.ask_rank import SelfReport, ask_report, ask_stack
from drumline.watch.sidecar.kernel_evidence import OutOfMemoryCheck
from drumline.watch.watch_folder import Ending, read_ending

STILL_AFTER_S = 1.0
INSPECT_WITHIN_S = 1.7
# A thread gets the GIL some milliseconds after it requests it.
ANSWERS_WITHIN_S = 0.5
WORKER_STACK_S = 0.4
# CPU time is counted in hundredths of a second, so faster observations show nothing new.
MIN_INTERVAL_S = 0.1
# The CPU time of a rank without progress is measured over this long: on a busy machine it gets the
# CPU irregularly.
MEASURED_S = 2.0
MIN_MEASURED_S = 0.8
# Observations that are further apart than this have missed what happened between them.
LATE_S = 1.0
# A rank may have hundreds of threads, each with its own list of children.
SEARCH_EVERY_S = 15.0
COUNT_EVERY_S = 1.0
# A thread that runs or waits for a CPU for this part of the time computes, if it uses slices of at
# least this length.
COMPUTES_SHARE = 0.5
SLICE_NS = 300_000
# A main thread that waits for a CPU for this part of the time may be why a rank does not answer.
STARVED_SHARE = 0.3
# A rank that is killed at the end of the grace period may be seen a little before it, by rounding.
KILL_SLACK_S = 0.2


class RankObserver:
    """One rank, from its first heartbeat to its exit."""

    def __init__(self, folder: Path, rank: int, host: str) -> None:
        self._folder = folder
        self._rank = rank
        self._host = host
        self._heartbeat: Heartbeat | None = None
        self._moved_s = 0.0
        self._process: RankProcess | None = None

    def fileno(self) -> int | None:
        """Becomes readable when the rank exits: its exit status is visible only until its parent
        has reaped it."""
        return self._process.handle.exit_fd if self._process else None

    def observe(self, now_s: float) -> RankState | None:
        """The first part of the state; None until the rank has a heartbeat. `now_s`: of
        time.monotonic()."""
        last = self._heartbeat
        heartbeat = read_heartbeat(self._file("heartbeat")) or self._heartbeat
        if heartbeat is None:
            return None
        if self._process is None or last is None or heartbeat.pid != last.pid:
            self.close()
            self._process = RankProcess(heartbeat.pid)
            stat = self._process.handle.stat()
            suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
            began_s = heartbeat.since_ns / 1e9 + suspended_s + 2 / TICKS_PER_S
            if stat is not None and stat.start_ticks / TICKS_PER_S > began_s:
                self._process.handle.close()  # the pid belongs to another process by now
        if last is None or (heartbeat.num_marks, heartbeat.num_moves) != (
            last.num_marks,
            last.num_moves,
        ):
            self._moved_s = now_s
        self._heartbeat = heartbeat
        self._process.observe(now_s, is_still=now_s - self._moved_s >= STILL_AFTER_S)
        process = self._process
        ending = self._own_kill(process) if process.state in EXITED else None
        return replace(
            self._state(heartbeat, now_s),
            state=process.state,
            state_s=now_s - process.state_since_s,
            cpu=process.cpu,
            is_starved=process.is_starved,
            has_io=process.has_io,
            exit=self._exit(process) if process.state in EXITED else None,
            killed_after_s=ending.grace_s if ending else None,
            killed_by=ending.by if ending else "",
            killed_because=ending.why if ending else "",
        )

    def activity(self, now_s: float) -> RankState | None:
        """Where the time of a script goes, which marks no phases itself (parallel/scripts/torch_hooks.py)."""
        record = read_heartbeat(self._file("activity"))
        return None if record is None else self._state(record, now_s)

    async def inspect(self) -> RankState:
        """The complete state. Never raises if the rank exits meanwhile. One at a time for each
        rank."""
        state = self.observe(time.monotonic())
        if state is None or self._process is None:
            return RankState(rank=self._rank, host=self._host, pid=0)
        if state.state not in EXITED:
            state = await self._questioned(state, self._process)
        if state.state not in EXITED:
            return state
        return replace(
            state,
            memory=self._process.memory.evidence() if state.exit in (None, -9) else "",
            collectives=state.collectives
            or ask_rank.read_report(self._folder, self._rank).collectives,
            stack=state.stack or ask_rank.fatal_stack(self._file("stacks")),
        )

    def close(self) -> None:
        if self._process:
            self._process.handle.close()
        self._process = None

    async def _questioned(self, state: RankState, process: RankProcess) -> RankState:
        end = time.monotonic() + INSPECT_WITHIN_S
        if tracer := int(processes.read_status(state.pid).get("TracerPid", "0")):
            debugger = read_stat(tracer)
            named = f"{debugger.name} (process {tracer})" if debugger else f"process {tracer}"
            state = replace(state, tracer=named)
        answers: bool | None = False
        stack: tuple[str, ...] = ()
        report = SelfReport()
        if state.state not in STOPPED:  # a stopped rank would answer when it is continued
            answer = asyncio.create_task(ask_report(self._folder, self._rank))
            asked_s = time.monotonic()
            times_before = thread_times(state.pid)
            # A rank that answers reports its stack itself. The signal is only for a rank in which
            # Python is blocked: it could crash any other (watch/self_report.py).
            await asyncio.wait({answer}, timeout=ANSWERS_WITHIN_S)
            calls = answer.result()[1].calls if answer.done() else ()
            file = self._file("stacks")
            stack = (
                ask_rank.stack_lines(state.pid, calls)
                if calls
                else await ask_stack(state.pid, file)
            )
            answers, report = await answer
            if not answers and main_thread_waited(
                state.pid, times_before, time.monotonic() - asked_s
            ):
                answers = None  # nobody knows: it had too little CPU time to answer
        workers = [await self._inspect_worker(*worker, process, end) for worker in report.workers]
        process.skip_answer(time.monotonic())
        state = replace(
            state,
            stack=stack,
            workers=tuple(workers),
            answers=answers,
            collectives=report.collectives,
        )
        latest = self.observe(time.monotonic())
        if (
            latest is not None
            and state.state in STOPPED
            and latest.state not in (*STOPPED, *EXITED)
        ):
            return replace(
                state, state=latest.state, state_s=latest.state_s, answers=None
            )  # it was continued
        if latest is None or latest.state not in EXITED:
            return state
        # It did not answer because it has exited meanwhile.
        return replace(state, state=latest.state, exit=latest.exit, answers=None)

    async def _inspect_worker(
        self, number: int, pid: int, process: RankProcess, end: float
    ) -> WorkerState:
        """One after the other, because all write to the same file; without stacks when the time is
        over."""
        stack: tuple[str, ...] = ()
        if (left_s := min(end - time.monotonic(), WORKER_STACK_S)) > 0:
            stack = await ask_stack(
                pid, self._file("stacks"), within_s=left_s, signal=WORKER_SIGNAL
            )
        return WorkerState(
            number=number,
            pid=pid,
            state=state_of(pid),
            cpu=process.descendants.cores.get(pid, 0.0),
            is_starved=process.descendants.are_starved.get(pid, False),
            in_fork_s=ask_rank.in_fork_s(pid),
            stack=stack,
        )

    def _file(self, kind: str) -> Path:
        return self._folder / f"rank-{self._rank:05d}.{kind}"

    def _state(self, heartbeat: Heartbeat, now_s: float) -> RankState:
        return RankState(
            rank=self._rank,
            host=self._host,
            pid=heartbeat.pid,
            step=heartbeat.step,
            phase=heartbeat.phase,
            micro=heartbeat.micro,
            num_marks=heartbeat.num_marks,
            collective=heartbeat.collective,
            num_moves=heartbeat.num_moves,
            moved_s=max(0.0, now_s - heartbeat.moved_ns / 1e9) if heartbeat.num_moves else None,
            age_s=max(0.0, now_s - heartbeat.since_ns / 1e9),
            failure=heartbeat.failure,
            failure_kind=heartbeat.failure_kind,
            spent_s=tuple(spent / 1e9 for spent in heartbeat.spent_ns),
        )

    def _own_kill(self, process: RankProcess) -> Ending | None:
        """How drumline has killed it; None: it has not."""
        ending = read_ending(self._folder)
        if ending is None or self._exit(process) not in (None, -signal.SIGKILL):
            return None
        return ending if process.state_since_s >= ending.kills_at_s - KILL_SLACK_S else None

    def _exit(self, process: RankProcess) -> int | None:
        """The exit code that the launcher recorded; otherwise what was observed of the process."""
        with suppress(OSError, ValueError):
            return int((self._folder / f"exit-{self._rank:05d}").read_text(encoding="utf-8"))
        return process.exit


class RankProcess:
    """Its state, and its use of CPU and files since the last observation."""

    def __init__(self, pid: int) -> None:
        self.handle = ProcessHandle(pid)
        self.memory = OutOfMemoryCheck(pid)
        self.descendants = Descendants(pid)
        self.state = ""
        self.state_since_s = 0.0
        self._observed_s = math.inf
        self.exit: int | None = None
        self.cpu = 0.0
        self.has_io = False
        self.is_starved = False
        self._scheduling = Scheduling(pid)
        self._readings: list[tuple[float, int, int | None]] = []
        """When, CPU time, and bytes read and written; the newest last."""

    def observe(self, now_s: float, *, is_still: bool) -> None:
        """`is_still`: the rank has shown no progress for a while."""
        stat = self.handle.stat()
        state = stat.state if stat else processes.GONE
        if state != self.state:
            self.state = state
            self.state_since_s = now_s
        # While this process itself was stopped, perhaps with the whole job, it observed nothing.
        self.state_since_s += max(0.0, now_s - self._observed_s - LATE_S)
        self._observed_s = now_s
        if stat is None or state == "Z":
            self.cpu = 0.0
            self.has_io = False
            self.is_starved = False
            if stat and (stat.exit_status or stat.num_threads <= 1):
                self.exit = os.waitstatus_to_exitcode(stat.exit_status)
            return
        if not self._readings or now_s - self._readings[-1][0] >= MIN_INTERVAL_S:
            self._measure(stat, now_s, is_still=is_still)

    def skip_answer(self, now_s: float) -> None:
        """Do not count the CPU time of an answer as work of the rank."""
        if stat := self.handle.stat():
            self._readings = [(now_s, stat.cpu_ticks, io_bytes(self.handle.pid))]
        self.descendants.skip_answer()
        self._scheduling.begin(now_s)

    def _measure(self, stat: ProcessStat, now_s: float, *, is_still: bool) -> None:
        # A rank that makes progress needs no measurement of its files and workers.
        moved = io_bytes(self.handle.pid) if is_still else None
        self._readings = [
            *(self._readings if is_still else self._readings[-1:]),
            (now_s, stat.cpu_ticks, moved),
        ]
        while len(self._readings) > 2 and now_s - self._readings[1][0] >= MEASURED_S:
            del self._readings[0]
        begin_s, ticks, _ = self._readings[0]
        measured_s = now_s - begin_s
        if not measured_s or (is_still and measured_s < MIN_MEASURED_S):
            return
        self.cpu = (stat.cpu_ticks - ticks) / (measured_s * TICKS_PER_S)
        self.has_io = (
            len({num_bytes for *_, num_bytes in self._readings if num_bytes is not None}) > 1
        )
        if is_still:
            self.descendants.count(now_s)
            self.cpu += sum(self.descendants.cores.values())
            self.has_io |= self.descendants.has_io
            self._scheduling.measure(now_s)
        self.is_starved = is_still and (
            self._scheduling.is_starved or any(self.descendants.are_starved.values())
        )


class Descendants:
    """The descendants of a rank. They are searched from time to time, and only while the rank makes
    no progress."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids: list[int] = []
        self._searched_s = self._counted_s = float("-inf")
        self._stats: dict[int, ProcessStat] = {}
        self.cores: dict[int, float] = {}  # by pid, between the last two counts
        self._scheduling: dict[int, Scheduling] = {}
        self._io_bytes: dict[int, int | None] = {}
        self.has_io = False  # whether one of them read or wrote files meanwhile

    @property
    def are_starved(self) -> dict[int, bool]:
        """By pid: whether it computes, and mostly waits for a CPU."""
        return {pid: scheduling.is_starved for pid, scheduling in self._scheduling.items()}

    def skip_answer(self) -> None:
        self._io_bytes = {pid: io_bytes(pid) for pid in self._io_bytes}

    def count(self, now_s: float) -> None:
        """Measure their use of CPU and files, at most once a second."""
        if now_s - self._counted_s < COUNT_EVERY_S:
            return
        if now_s - self._searched_s >= SEARCH_EVERY_S:
            self._searched_s = now_s
            self._pids = []
            new = [self._pid]
            # Not the sidecar, which the first rank has started.
            while new := [
                child for pid in new for child in processes.children(pid) if child != os.getpid()
            ]:
                self._pids += new
        stats = {pid: stat for pid in self._pids if (stat := read_stat(pid))}
        moved = {pid: io_bytes(pid) for pid in stats}
        elapsed_ticks = (now_s - self._counted_s) * TICKS_PER_S
        measured_before = {
            pid: old
            for pid, old in self._stats.items()
            if pid in stats and stats[pid].start_ticks == old.start_ticks
        }
        self.cores = {
            pid: (stats[pid].cpu_ticks - old.cpu_ticks) / elapsed_ticks
            for pid, old in measured_before.items()
        }
        self.has_io = any(moved[pid] != self._io_bytes.get(pid) for pid in measured_before)
        self._stats = stats
        self._io_bytes = moved
        self._counted_s = now_s
        self._scheduling = {pid: self._scheduling.get(pid) or Scheduling(pid) for pid in stats}
        for scheduling in self._scheduling.values():
            scheduling.measure(now_s)


class Scheduling:
    """Whether a process computes on a crowded machine, where it gets few percent of a core. A
    thread that computes runs or waits for a CPU most of the time, and uses its whole slices; one
    that polls, as for the GIL, waits as often, but needs little of each."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: dict[int, ThreadTimes] = {}
        self._began_s = math.inf
        self.is_starved = False

    def begin(self, now_s: float) -> None:
        """Count from here on."""
        self._before = thread_times(self._pid)
        self._began_s = now_s

    def measure(self, now_s: float) -> None:
        """At most once a second."""
        elapsed_s = now_s - self._began_s
        if elapsed_s == -math.inf:
            self.begin(now_s)
            return
        if elapsed_s < COUNT_EVERY_S:
            return
        after = thread_times(self._pid)
        common = self._before.keys() & after.keys()
        if (
            self._pid in common
            and after[self._pid] == self._before[self._pid]
            and state_of(self._pid) == "R"
        ):
            return  # its main thread still waits: the kernel counts that when it has ended
        self.is_starved = any(
            _computes(self._before[thread], after[thread], elapsed_s) for thread in common
        )
        self._before = after
        self._began_s = now_s


def _computes(before: ThreadTimes, after: ThreadTimes, elapsed_s: float) -> bool:
    run_ns = after.run_ns - before.run_ns
    wanted_s = (run_ns + after.wait_ns - before.wait_ns) / 1e9
    num_slices = max(1, after.num_slices - before.num_slices)
    return wanted_s >= COMPUTES_SHARE * elapsed_s and run_ns >= SLICE_NS * num_slices


def main_thread_waited(pid: int, before: Mapping[int, ThreadTimes], elapsed_s: float) -> bool:
    """Whether its main thread waited for a CPU during a large part of this time."""
    after = thread_times(pid)
    if pid not in before or pid not in after:
        return False
    waited_s = (after[pid].wait_ns - before[pid].wait_ns) / 1e9
    if state_of(pid) == "R":  # the kernel counts a wait when it has ended
        waited_s = max(waited_s, elapsed_s - (after[pid].run_ns - before[pid].run_ns) / 1e9)
    return waited_s >= STARVED_SHARE * elapsed_s
