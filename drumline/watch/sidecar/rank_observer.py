"""What a sidecar observes of one rank on its node. `observe` is a few reads of /proc, five times a second; `inspect`
asks the rank for its report, and takes a second and a half at most, whatever the rank does."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from drumline.processes import EXITED, STOPPED, TICKS_PER_S, ProcessStat, read_stat, read_status, state_of
from drumline.watch.cluster_state import RankState, WorkerState
from drumline.watch.heartbeat import Heartbeat, read_heartbeat
from drumline.watch.rank.self_report import WORKER_SIGNAL
from drumline.watch.sidecar.ask_rank import (
    SelfReport,
    ask_report,
    ask_stack,
    fatal_stack,
    in_fork_s,
    read_report,
    stack_lines,
)
from drumline.watch.sidecar.rank_process import RankProcess

STILL_AFTER_S = 1.0
INSPECT_WITHIN_S = 1.7
# Python gives its lock to another thread some milliseconds after it asks.
ANSWERS_WITHIN_S = 0.5
WORKER_STACK_S = 0.4


class RankObserver:
    """One rank, from its first heartbeat to its exit."""

    def __init__(self, folder: Path, rank: int, host: str) -> None:
        self._folder, self._rank, self._host = folder, rank, host
        self._heartbeat: Heartbeat | None = None
        self._moved_s = 0.0
        self._process: RankProcess | None = None

    def fileno(self) -> int | None:
        """Becomes readable when the rank exits: an observation at that moment still finds out how, before its parent
        reaps it. None until there is a heartbeat, and where the kernel has no such thing."""
        return self._process.handle.exit_fd if self._process else None

    def observe(self, now_s: float) -> RankState | None:
        """The first part of the state; None until the rank has a heartbeat. `now_s`: of time.monotonic()."""
        last, heartbeat = self._heartbeat, read_heartbeat(self._file("heartbeat")) or self._heartbeat
        if heartbeat is None:
            return None
        if self._process is None or last is None or heartbeat.pid != last.pid:
            self.close()
            self._process = RankProcess(heartbeat.pid)
            if _is_other_process(self._process.handle.stat(), heartbeat):
                self._process.handle.close()
        if last is None or (heartbeat.num_marks, heartbeat.num_moves) != (last.num_marks, last.num_moves):
            self._moved_s = now_s
        self._heartbeat = heartbeat
        self._process.observe(now_s, is_still=now_s - self._moved_s >= STILL_AFTER_S)
        process = self._process
        return replace(
            self._state(heartbeat, now_s),
            state=process.state,
            state_s=now_s - process.state_since_s,
            cpu=process.cpu,
            has_io=process.has_io,
            exit=self._exit(process) if process.state in EXITED else None,
        )

    def activity(self, now_s: float) -> RankState | None:
        """Where the time of a script goes, which marks no phases itself (rank/torch_hooks.py)."""
        record = read_heartbeat(self._file("activity"))
        return None if record is None else self._state(record, now_s)

    async def inspect(self) -> RankState:
        """All that can be found out. Never raises for a rank that exits meanwhile. One at a time for each rank."""
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
            collectives=state.collectives or read_report(self._folder, self._rank).collectives,
            stack=state.stack or fatal_stack(self._file("stacks")),
        )

    def close(self) -> None:
        if self._process:
            self._process.handle.close()
        self._process = None

    async def _questioned(self, state: RankState, process: RankProcess) -> RankState:
        end = time.monotonic() + INSPECT_WITHIN_S
        if tracer := int(read_status(state.pid).get("TracerPid", "0")):
            debugger = read_stat(tracer)
            named = f"{debugger.name} (process {tracer})" if debugger else f"process {tracer}"
            state = replace(state, tracer=named)
        answers: bool | None = False
        stack: tuple[str, ...] = ()
        report = SelfReport()
        if state.state not in STOPPED:  # which would answer late, when it is continued
            asked = asyncio.create_task(ask_report(self._folder, self._rank))
            # A rank that answers reports its stack by itself. The signal is for one in which Python is blocked: to any
            # other it is a danger (rank/self_report.py).
            await asyncio.wait({asked}, timeout=ANSWERS_WITHIN_S)
            calls = asked.result()[1].calls if asked.done() else ()
            stack = stack_lines(state.pid, calls) if calls else await ask_stack(state.pid, self._file("stacks"))
            answers, report = await asked
        workers = await self._inspect_workers(process.descendants.workers(report.workers), end)
        process.skip_answer(time.monotonic())
        state = replace(state, stack=stack, workers=workers, answers=answers, collectives=report.collectives)
        latest = self.observe(time.monotonic())
        if latest is not None and state.state in STOPPED and latest.state not in (*STOPPED, *EXITED):
            return replace(state, state=latest.state, state_s=latest.state_s, answers=None)  # it was continued
        if latest is None or latest.state not in EXITED:
            return state
        # It has exited meanwhile: that is why it did not answer.
        return replace(state, state=latest.state, exit=latest.exit, answers=None)

    async def _inspect_workers(self, workers: tuple[WorkerState, ...], end: float) -> tuple[WorkerState, ...]:
        """One after the other, because all write into the same file; without stacks when the time is over."""
        found: list[WorkerState] = []
        for worker in workers:
            left_s = min(end - time.monotonic(), WORKER_STACK_S)
            stack: tuple[str, ...] = ()
            if left_s > 0:
                file = self._file("stacks")
                stack = await ask_stack(worker.pid, file, within_s=left_s, signal=WORKER_SIGNAL)
            found.append(replace(worker, state=state_of(worker.pid), in_fork_s=in_fork_s(worker.pid), stack=stack))
        return tuple(found)

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

    def _exit(self, process: RankProcess) -> int | None:
        """What the launcher wrote, which has it from the kernel; else what was seen of the process itself."""
        with suppress(OSError, ValueError):
            return int((self._folder / f"exit-{self._rank:05d}").read_text(encoding="utf-8"))
        return process.exit


def _is_other_process(stat: ProcessStat | None, heartbeat: Heartbeat) -> bool:
    """Whether the pid belongs to another process by now: one that started after the heartbeat."""
    if stat is None:
        return False
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return stat.start_ticks / TICKS_PER_S > heartbeat.since_ns / 1e9 + suspended_s + 2 / TICKS_PER_S
