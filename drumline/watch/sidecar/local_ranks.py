"""The ranks of this node: their observed states, the reports of their scripts, and how they are
killed.

`observe` reads heartbeats and /proc, five times a second; `inspect` asks ranks for their reports, and
takes at most a second and a half, whatever they do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from drumline.base.processes import (
    EXITED,
    STOPPED,
    TICKS_PER_S,
    descendants,
    read_stat,
    send_signal,
    state_of,
    thread_times,
)
from drumline.base.untrusted import parse_json, read_json
from drumline.runs.step_times import StepTimes, StepTimesHistogram
from drumline.watch.cluster_state import NodeState, RankState, WorkerState
from drumline.watch.heartbeat import Heartbeat, Phase, RankProgress, read_heartbeat
from drumline.watch.self_report import WORKER_SIGNAL
from drumline.watch.sidecar.rank_process import (
    RankProcess,
    SelfReport,
    ask_report,
    ask_stack,
    fatal_stack,
    in_fork_s,
    main_thread_waited,
    read_report,
    stack_lines,
)
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.sidecar.system_evidence import kernel_lines, link_problem
from drumline.watch.watch_folder import Ending, note_ending, read_ending

STILL_AFTER_S = 1.0
INSPECT_WITHIN_S = 1.7

# A thread gets the GIL some milliseconds after it requests it.
ANSWERS_WITHIN_S = 0.5
WORKER_STACK_S = 0.4

# A rank that is killed at the end of the grace period may be seen a little before it, by rounding.
KILL_SLACK_S = 0.2

# A script's report is sent only if no more than this waits: heartbeats come first.
MAX_UNSENT_BYTES = 1 << 16


class LocalRanks:
    """Observes the ranks, and keeps their latest states."""

    def __init__(self, options: SidecarOptions, address: str = "") -> None:
        """`address`: where the other nodes reach this one."""
        self.options = options
        self._address = address
        self._observers = [
            RankObserver(Path(options.folder), rank, options.host) for rank in options.ranks
        ]
        self._begun = time.monotonic()
        self._exit_fds: set[int] = set()
        """The descriptors that the event loop watches."""

        self.state = NodeState(node=options.node, host=options.host, slowdown=start_slowdown())

    def observe(self, now_s: float, heartbeat_age_s: Mapping[int, float]) -> NodeState:
        """The cheap part of the state, for each heartbeat of this node."""
        ranks = [observer.observe(now_s) for observer in self._observers]
        activity = [observer.activity(now_s) for observer in self._observers]

        self.state = replace(
            self.state,
            ranks=tuple(filter(None, ranks)),
            heartbeat_age_s=heartbeat_age_s,
            activity=tuple(filter(None, activity)),
        )
        return self.state

    def observe_exits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Observe a rank at once when it exits: its exit status is visible only until its parent
        has reaped it."""

        def observe(observer: RankObserver, fd: int) -> None:
            loop.remove_reader(fd)
            observer.observe(time.monotonic())

        for observer in self._observers:
            fd = observer.fileno()
            if fd is not None and fd not in self._exit_fds:
                self._exit_fds.add(fd)
                loop.add_reader(fd, observe, observer, fd)

    async def inspect(self) -> NodeState:
        """The complete state; takes a second or two."""
        ranks = await asyncio.gather(*(observer.inspect() for observer in self._observers))
        return replace(
            self.state,
            ranks=tuple(ranks),
            link=link_problem(self._address) if self._address else "",
            kernel=kernel_lines(self._begun),
            activity=(),
        )

    def step_times(self) -> StepTimes | None:
        """Of the rank with the longest ones."""
        times = [observer.step_times.times() for observer in self._observers]
        return max(filter(None, times), key=lambda recorded: recorded.p99_s, default=None)

    @property
    def have_started(self) -> bool:
        """Whether every rank was seen at least once."""
        return len(self.state.ranks) == len(self.options.ranks)

    @property
    def are_done(self) -> bool:
        """Whether every rank is out of its loop, or has exited."""
        if not self.have_started:
            return False
        return all(rank.phase is Phase.LEFT or rank.state in EXITED for rank in self.state.ranks)

    def kill(self, why: str) -> None:
        """Kill the ranks and their descendants, except this process, with SIGKILL: some may be
        stopped."""
        ending = Ending(time.monotonic(), 0.0, by="watchdog", why=why)
        note_ending(Path(self.options.folder), ending)

        for rank in self.state.ranks:
            if rank.state in EXITED:
                continue

            # The rank first: it must not see its workers end, and call that the cause.
            pids = [rank.pid, *descendants(rank.pid)]
            send_signal([pid for pid in pids if pid != os.getpid()], signal.SIGKILL)


def start_slowdown() -> float:
    """How many times longer this process has taken so far than the CPU time that it used; at least
    1. It is called when the process has started: what it did was to load Python and its modules."""
    stat = read_stat(os.getpid())
    if stat is None:
        return 1.0

    used_s = max(time.process_time(), 1 / TICKS_PER_S)
    return max(1.0, stat.age_s / used_s)


@dataclass(eq=False)
class RankObserver:
    """One rank, from its first heartbeat to its exit."""

    folder: Path
    rank: int
    host: str
    _heartbeat: Heartbeat | None = None
    """The latest that could be read."""

    _process: RankProcess | None = None
    """Of the latest heartbeat."""

    def __post_init__(self) -> None:
        self.step_times = StepTimesHistogram(self.rank)

    def fileno(self) -> int | None:
        """Becomes readable when the rank exits: its exit status is visible only until its parent
        has reaped it."""
        return self._process.handle.exit_fd if self._process else None

    def observe(self, now_s: float) -> RankState | None:
        """The first part of the state; None until the rank has a heartbeat. `now_s`: of
        time.monotonic()."""
        last = self._heartbeat
        heartbeat = read_heartbeat(self._file("heartbeat")) or last
        if heartbeat is None:
            return None

        if self._process is None or last is None or heartbeat.pid != last.pid:
            self.close()
            self._process = RankProcess(heartbeat.pid)

        self._count_steps(last, heartbeat)
        self._heartbeat = heartbeat

        process = self._process
        state = self._state(heartbeat, now_s)
        process.observe(now_s, is_still=state.still_s >= STILL_AFTER_S)
        state = replace(
            state,
            state=process.state,
            state_s=now_s - process.state_since_s,
            cpu=process.cpu,
            is_starved=process.is_starved,
            has_io=process.has_io,
        )

        if process.state not in EXITED:
            return state
        return self._with_exit(state, process)

    def _count_steps(self, last: Heartbeat | None, heartbeat: Heartbeat) -> None:
        """Add the steps since the last heartbeat to the step times."""
        if last is None or heartbeat.pid != last.pid or heartbeat.step < last.step:
            return  # it was restarted
        for step, seconds in heartbeat.step_s(last.step):
            self.step_times.add(step, seconds)

    def activity(self, now_s: float) -> RankState | None:
        """Where the time of a script goes, which marks no phases itself (parallel/scripts/torch_hooks.py)."""
        record = read_heartbeat(self._file("activity"))
        return None if record is None else self._state(record, now_s)

    async def inspect(self) -> RankState:
        """The complete state. Never raises if the rank exits meanwhile. One at a time for each
        rank."""
        state = self.observe(time.monotonic())
        if state is None or self._process is None:
            return RankState(rank=self.rank, host=self.host, pid=0)

        if state.state not in EXITED:
            state = await self._questioned(state, self._process)
        if state.state not in EXITED:
            return state

        memory = ""
        if state.exit in (None, -signal.SIGKILL):
            memory = self._process.memory.evidence()

        return replace(
            state,
            memory=memory,
            collectives=state.collectives or read_report(self.folder, self.rank).collectives,
            stack=state.stack or fatal_stack(self._file("stacks")),
        )

    def close(self) -> None:
        """Release the process, which has ended or was followed by another."""
        if self._process:
            self._process.handle.close()
        self._process = None

    async def _questioned(self, state: RankState, process: RankProcess) -> RankState:
        """The state with what the rank answers: its stack, workers and collectives."""
        end = time.monotonic() + INSPECT_WITHIN_S
        answers: bool | None = False
        stack: tuple[str, ...] = ()
        report = SelfReport()
        if state.state not in STOPPED:  # it would answer when it is continued
            answers, stack, report = await self._ask(state.pid)

        workers = []
        for number, pid in report.workers:
            workers.append(await self._inspect_worker(number, pid, process, end))

        process.skip_answer(time.monotonic())
        latest = self.observe(time.monotonic()) or state
        was_continued = state.state in STOPPED and latest.state not in STOPPED
        if latest.state in EXITED or was_continued:  # that is why it did not answer
            state = latest
            answers = None

        return replace(
            state,
            stack=stack,
            workers=tuple(workers),
            answers=answers,
            collectives=report.collectives,
        )

    async def _ask(self, pid: int) -> tuple[bool | None, tuple[str, ...], SelfReport]:
        """Ask for a report through the pipe, and for a stack by a signal if that takes long.
        Whether it answers (None: unknown), the stack and the report."""
        asking = asyncio.create_task(ask_report(self.folder, self.rank))
        asked_s = time.monotonic()
        times_before = thread_times(pid)

        # A rank that answers reports its stack itself. The signal is only for a rank in which
        # Python is blocked: it could crash any other (watch/self_report.py).
        await asyncio.wait({asking}, timeout=ANSWERS_WITHIN_S)
        calls = asking.result()[1].calls if asking.done() else ()
        stack = stack_lines(pid, calls) or await ask_stack(pid, self._file("stacks"))

        answers, report = await asking
        if not answers and main_thread_waited(pid, times_before, time.monotonic() - asked_s):
            answers = None  # it had too little CPU time to answer

        return answers, stack, report

    async def _inspect_worker(
        self,
        number: int,
        pid: int,
        process: RankProcess,
        end: float,
    ) -> WorkerState:
        """One after the other, because all write to the same file; without stacks when the time is
        over."""
        stack: tuple[str, ...] = ()
        left_s = min(end - time.monotonic(), WORKER_STACK_S)
        if left_s > 0:
            file = self._file("stacks")
            stack = await ask_stack(pid, file, within_s=left_s, signal=WORKER_SIGNAL)

        return WorkerState(
            number=number,
            pid=pid,
            state=state_of(pid),
            cpu=process.descendants.cores.get(pid, 0.0),
            is_starved=process.descendants.are_starved.get(pid, False),
            in_fork_s=in_fork_s(pid),
            stack=stack,
        )

    def _file(self, kind: str) -> Path:
        """One of those that the rank writes in the watch folder."""
        return self.folder / f"rank-{self.rank:05d}.{kind}"

    def _state(self, heartbeat: Heartbeat, now_s: float) -> RankState:
        """The part of the state that the heartbeat shows."""
        progress = {field.name: getattr(heartbeat, field.name) for field in fields(RankProgress)}
        moved_s = None
        if heartbeat.num_moves:
            moved_s = max(0.0, now_s - heartbeat.moved_at)

        age_s = max(0.0, now_s - heartbeat.entered_at)
        return RankState(**progress, host=self.host, age_s=age_s, moved_s=moved_s)

    def _with_exit(self, state: RankState, process: RankProcess) -> RankState:
        """How it exited: as the launcher recorded it, otherwise as it was observed. A launcher
        records the exits before it ends the other ranks, and none after that."""
        code = read_json(int, self.folder / f"exit-{self.rank:05d}")
        state = replace(state, exit=process.exit if code is None else code)
        ending = read_ending(self.folder)
        if ending is None:
            return state

        exited_s = process.state_since_s
        state = replace(state, asked_to_exit=code is None and exited_s >= ending.began_s)
        may_be_killed = state.exit in (None, -signal.SIGKILL)
        if not may_be_killed or exited_s < ending.kills_at_s - KILL_SLACK_S:
            return state

        return replace(
            state,
            killed_after_s=ending.grace_s,
            killed_by=ending.by,
            killed_because=ending.why,
        )


class ScriptReports:
    """The latest report of each rank's script: read from its file, and sent to every sidecar that
    may lead; sent again if that failed, unless it is too long."""

    def __init__(self, options: SidecarOptions) -> None:
        self._files = {
            rank: Path(options.folder, f"rank-{rank:05d}.script") for rank in options.ranks
        }
        self._read_at: dict[int, int] = {}
        """By rank: when the file that was read had been written, in ns."""

        self._records: dict[int, Any] = {}
        """By rank: what it held."""

        self._sent: dict[tuple[int, int], int] = {}
        """By node and rank: the change that was sent."""

    def update(self, network: SidecarNetwork) -> Iterator[tuple[int, Any]]:
        """Ranks whose reports have changed, with the reports as JSON values."""
        for rank, file in self._files.items():
            # A script that has not started, or has exited, has none.
            with suppress(OSError, ValueError):
                changed = file.stat().st_mtime_ns
                if changed != self._read_at.get(rank):
                    self._records[rank] = parse_json(file.read_bytes())
                    self._read_at[rank] = changed
                    yield rank, self._records[rank]

        for rank, record in self._records.items():
            message = {"kind": "script", "rank": rank, "report": record}
            changed = self._read_at[rank]
            for node in network.peers:
                if self._sent.get((node, rank)) == changed:
                    continue
                if network.send(node, message, max_unsent=MAX_UNSENT_BYTES):
                    self._sent[node, rank] = changed
