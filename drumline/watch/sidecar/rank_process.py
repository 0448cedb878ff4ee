"""A rank's process, as another process sees it: its state, its use of CPU and files, and its answers.

It is asked for its report (watch/self_report.py) through a pipe, which a thread of the rank answers,
or by a signal, which it answers even if the GIL is held. None of this blocks, whatever the rank does.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drumline.base import processes
from drumline.base.processes import (
    EXITED,
    STOPPED,
    TICKS_PER_S,
    ProcessHandle,
    ProcessStat,
    ThreadTimes,
    has_signal,
    io_bytes,
    read_stat,
    read_status,
    state_of,
    thread_times,
    threads,
)
from drumline.base.untrusted import read_json
from drumline.watch.cluster_state import Collective
from drumline.watch.self_report import ANSWERING_THREAD, REPORT_SUFFIX, STACK_SIGNAL, WORKER_SIGNAL
from drumline.watch.sidecar.system_evidence import OutOfMemoryCheck

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
REPORT_WITHIN_S = 1.0
REPORT_EVERY_S = 0.01
STACK_WITHIN_S = 0.4
STACK_EVERY_S = 0.004
MAX_BYTES = 1 << 18
MAX_FRAMES = 48
OURS = "/drumline/"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_ANSWER = re.compile(r"^(Current thread |Stack )", re.MULTILINE)
_NOT_HANDLED = ("SigPnd", "ShdPnd", "SigBlk")

# Python has no tgkill, and the C library only since 2.30.
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


class UseReading(NamedTuple):
    """What a process has used up to now."""

    now_s: float
    cpu_ticks: int
    io_bytes: int | None
    """None: not read."""


class RankProcess:
    """Its state, and its use of CPU and files since the last observation."""

    def __init__(self, pid: int) -> None:
        self.handle = ProcessHandle(pid)
        self.memory = OutOfMemoryCheck(pid)
        self.descendants = Descendants(pid)

        self.state = ""
        self.state_since_s = 0.0
        self.exit: int | None = None
        """Its exit code, or minus a signal; None: not known."""

        self.cpu = 0.0
        """In cores, with its descendants while it is still."""

        self.has_io = False
        self.is_starved = False
        """Whether it, or a descendant, computes and mostly waits for a CPU."""

        self._observed_s = math.inf
        self._scheduling = Scheduling(pid)
        self._readings: list[UseReading] = []
        """The newest last."""

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

        if not self._readings or now_s - self._readings[-1].now_s >= MIN_INTERVAL_S:
            self._measure(stat, now_s, is_still=is_still)

    def skip_answer(self, now_s: float) -> None:
        """Do not count the CPU time of an answer as work of the rank."""
        if stat := self.handle.stat():
            self._readings = [UseReading(now_s, stat.cpu_ticks, io_bytes(self.handle.pid))]

        self.descendants.skip_answer()
        self._scheduling.begin(now_s)

    def _measure(self, stat: ProcessStat, now_s: float, *, is_still: bool) -> None:
        """Measure its use of the CPU and of files since the oldest reading."""
        # A rank that makes progress needs no measurement of its files and workers.
        num_bytes = None
        if is_still:
            num_bytes = io_bytes(self.handle.pid)
        else:
            del self._readings[:-1]

        self._readings.append(UseReading(now_s, stat.cpu_ticks, num_bytes))
        while len(self._readings) > 2 and now_s - self._readings[1].now_s >= MEASURED_S:
            del self._readings[0]

        first = self._readings[0]
        measured_s = now_s - first.now_s
        if not measured_s or (is_still and measured_s < MIN_MEASURED_S):
            return

        self.cpu = (stat.cpu_ticks - first.cpu_ticks) / (measured_s * TICKS_PER_S)
        sizes = {reading.io_bytes for reading in self._readings}
        self.has_io = len(sizes - {None}) > 1
        self.is_starved = False

        if is_still:
            self.descendants.count(now_s)
            self.cpu += sum(self.descendants.cores.values())
            self.has_io |= self.descendants.has_io

            self._scheduling.measure(now_s)
            starved_workers = self.descendants.are_starved.values()
            self.is_starved = self._scheduling.is_starved or any(starved_workers)


class Descendants:
    """The descendants of a rank. They are searched from time to time, and only while the rank makes
    no progress."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids: list[int] = []
        """Those of the latest search."""

        self._searched_s = -math.inf
        self._counted_s = -math.inf
        self._stats: dict[int, ProcessStat] = {}
        """Of the latest count."""

        self.cores: dict[int, float] = {}
        """By pid, between the last two counts."""

        self._scheduling: dict[int, Scheduling] = {}
        self._io_bytes: dict[int, int | None] = {}
        self.has_io = False
        """Whether one of them read or wrote files meanwhile."""

    @property
    def are_starved(self) -> dict[int, bool]:
        """By pid: whether it computes, and mostly waits for a CPU."""
        return {pid: scheduling.is_starved for pid, scheduling in self._scheduling.items()}

    def skip_answer(self) -> None:
        """Do not count what they read or wrote meanwhile."""
        self._io_bytes = {pid: io_bytes(pid) for pid in self._io_bytes}

    def count(self, now_s: float) -> None:
        """Measure their use of CPU and files, at most once a second."""
        if now_s - self._counted_s < COUNT_EVERY_S:
            return

        if now_s - self._searched_s >= SEARCH_EVERY_S:
            self._searched_s = now_s
            self._pids = list(_search_descendants(self._pid))

        stats = {pid: stat for pid in self._pids if (stat := read_stat(pid))}
        elapsed_ticks = (now_s - self._counted_s) * TICKS_PER_S
        self.cores = {
            pid: (stat.cpu_ticks - self._stats[pid].cpu_ticks) / elapsed_ticks
            for pid, stat in stats.items()
            if pid in self._stats
        }
        self._stats = stats
        self._counted_s = now_s

        moved = {pid: io_bytes(pid) for pid in stats}
        self.has_io = any(moved[pid] != self._io_bytes.get(pid) for pid in self.cores)
        self._io_bytes = moved

        self._scheduling = {pid: self._scheduling.get(pid) or Scheduling(pid) for pid in stats}
        for scheduling in self._scheduling.values():
            scheduling.measure(now_s)


def _search_descendants(pid: int) -> Iterator[int]:
    """Without the sidecar, which the first rank has started."""
    for child in processes.children(pid):
        if child != os.getpid():
            yield child
            yield from _search_descendants(child)


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

        before = self._before
        after = thread_times(self._pid)
        threads = before.keys() & after.keys()
        has_not_run = self._pid in threads and after[self._pid] == before[self._pid]
        if has_not_run and state_of(self._pid) == "R":
            return  # its main thread still waits: the kernel counts that when it has ended

        self.is_starved = any(
            _computes(after[thread].since(before[thread]), elapsed_s) for thread in threads
        )
        self._before = after
        self._began_s = now_s


def _computes(used: ThreadTimes, elapsed_s: float) -> bool:
    """Whether a thread needed most of this time, in whole slices."""
    needed_s = (used.run_ns + used.wait_ns) / 1e9
    uses_slices = used.run_ns >= SLICE_NS * max(1, used.num_slices)
    return uses_slices and needed_s >= COMPUTES_SHARE * elapsed_s


def main_thread_waited(pid: int, before: Mapping[int, ThreadTimes], elapsed_s: float) -> bool:
    """Whether its main thread waited for a CPU during a large part of this time."""
    after = thread_times(pid)
    if pid not in before or pid not in after:
        return False

    used = after[pid].since(before[pid])
    waited_s = used.wait_ns / 1e9
    if state_of(pid) == "R":  # the kernel counts a wait when it has ended
        waited_s = max(waited_s, elapsed_s - used.run_ns / 1e9)

    return waited_s >= STARVED_SHARE * elapsed_s


# What it answers


@dataclass(frozen=True, kw_only=True)
class SelfReport:
    """The last report of a rank (watch/self_report.py); a rank that fails writes one without being
    asked."""

    number: int | None = None
    """The number of the question that it answers."""

    calls: tuple[tuple[str, int | None, str], ...] = ()
    """File, line and name of the main thread's calls, the innermost first."""

    workers: tuple[tuple[int, int], ...] = ()
    """Number and pid of each DataLoader worker that it waits for."""

    collectives: tuple[Collective, ...] = ()


def read_report(folder: Path, rank: int) -> SelfReport:
    """Empty where there is none."""
    report = read_json(SelfReport, folder / f"rank-{rank:05d}.{REPORT_SUFFIX}")
    return report or SelfReport()


async def ask_report(
    folder: Path,
    rank: int,
    *,
    within_s: float = REPORT_WITHIN_S,
) -> tuple[bool | None, SelfReport]:
    """Whether it answers, and its report. None: there is no pipe with a reader."""
    number = ((read_report(folder, rank).number or 0) + 1) % 256
    if not _write_question(folder / f"rank-{rank:05d}.ask", number):
        return None, SelfReport()

    end = time.monotonic() + within_s
    while time.monotonic() < end:
        await asyncio.sleep(REPORT_EVERY_S)
        report = read_report(folder, rank)
        if report.number == number:
            return True, report

    return False, SelfReport()


def _write_question(path: Path, number: int) -> bool:
    """False: there is no reader."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False  # not created yet, or without a reader

    try:
        os.write(fd, bytes([number]))
    except BlockingIOError:
        pass  # full of questions without an answer: it waits for those already
    except OSError:
        return False
    finally:
        os.close(fd)

    return True


async def ask_stack(
    pid: int,
    file: Path,
    *,
    within_s: float = STACK_WITHIN_S,
    signal: int = STACK_SIGNAL,
) -> tuple[str, ...]:
    """The main thread's calls, the innermost first. Empty when the process cannot answer: it has no
    handler (the signal would end it), is stopped or blocked in the kernel, or has exited. `signal`:
    WORKER_SIGNAL for forked processes."""
    thread = _thread_to_ask(pid, signal)
    if thread is None:
        return ()

    with suppress(OSError):
        os.truncate(file, 0)
        if _TGKILL is None:
            os.kill(pid, signal)
        elif _libc.syscall(_TGKILL, pid, thread, signal):
            return ()

        if await _has_handled(pid, thread, within_s, signal):
            text = file.read_bytes()[:MAX_BYTES].decode(errors="replace")
            return main_thread_stack(text, _cwd(pid))

    return ()


def _thread_to_ask(pid: int, signal: int) -> int | None:
    """A running main thread gets the signal itself, so that its stack does not change; a waiting
    one is not interrupted if another thread can answer."""
    status = read_status(pid)
    stat = read_stat(pid)
    if stat is None or stat.state in STOPPED or not has_signal(status, "SigCgt", signal):
        return None

    thread = pid if stat.state == "R" else _answering_thread(pid)
    status_of_thread = read_status(pid, thread)
    if status_of_thread.get("State", "D")[0] in ("D", *STOPPED, *EXITED):
        return None

    is_pending = any(has_signal(status_of_thread, kind, signal) for kind in _NOT_HANDLED)
    return None if is_pending else thread  # one signal is enough


def _answering_thread(pid: int) -> int:
    """The main thread, if no other one waits for questions."""
    for thread in threads(pid):
        stat = read_stat(pid, thread)
        if stat is not None and stat.name == ANSWERING_THREAD:
            return thread

    return pid


async def _has_handled(pid: int, thread: int, within_s: float, signal: int) -> bool:
    """Until it is handled a signal is pending, and while it is handled it is blocked."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        await asyncio.sleep(STACK_EVERY_S)
        status = read_status(pid, thread)
        if not status:
            return False
        if not any(has_signal(status, kind, signal) for kind in _NOT_HANDLED):
            return True

    return False


def in_fork_s(pid: int) -> float:
    """How long a process that a rank has forked has been asleep in `fork`: it still has the rank's
    handler, and has not registered its own. 0: it has left, or runs."""
    stat = read_stat(pid)
    if stat is None or stat.state != "S":
        return 0.0

    status = read_status(pid)
    has_handler = has_signal(status, "SigCgt", STACK_SIGNAL)
    has_left = has_signal(status, "SigCgt", WORKER_SIGNAL)
    return max(0.0, stat.age_s) if has_handler and not has_left else 0.0


def stack_lines(pid: int, calls: Iterable[tuple[str, int | None, str]]) -> tuple[str, ...]:
    """Calls that a process has reported, as a stack has them: `train.py:12 in step`."""
    cwd = _cwd(pid)
    return tuple(f"{shorten(file, cwd)}:{line or '???'} in {name}" for file, line, name in calls)


def fatal_stack(file: Path) -> tuple[str, ...]:
    """The stack that a process wrote when a fatal signal ended it, after any earlier answer."""
    try:
        text = file.read_bytes()[-MAX_BYTES:].decode(errors="replace")
    except OSError:
        return ()

    _, is_fatal, stacks = text.rpartition("Fatal Python error")
    return main_thread_stack(stacks, "") if is_fatal else ()


def main_thread_stack(text: str, cwd: str) -> tuple[str, ...]:
    """The main thread's calls in what faulthandler wrote: the oldest thread is the last one
    there."""
    # a late answer of another process came in between
    if len(_ANSWER.findall(text)) > 1:
        return ()

    frames: list[str] = []
    for line in text.splitlines():
        if "hread 0x" in line:
            frames = []
        elif match := _FRAME.match(line):
            frames.append(f"{shorten(match['file'], cwd)}:{match['line']} in {match['name']}")

    return tuple(frames[:MAX_FRAMES])


def shorten(file: str, cwd: str) -> str:
    """The path below the process's folder or below the packages' folder, or its last two parts."""
    for package in ("/site-packages/", "/dist-packages/"):
        if package in file:
            return file.rpartition(package)[2]

    if OURS in file:
        return file[file.rindex(OURS) + 1 :]

    folder = cwd.rstrip("/") + "/"
    if cwd and file.startswith(folder):
        return file.removeprefix(folder)
    return "/".join(file.split("/")[-2:]) if file.startswith("/") else file


def _cwd(pid: int) -> str:
    """The folder of a process; empty: not known."""
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
