"""Asks a rank for its report (watch/self_report.py): through a pipe, which a thread of the rank
answers, or by a signal, which it answers even if the GIL is held. None of this blocks, whatever the
rank does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drumline.base.processes import (
    EXITED,
    STOPPED,
    TICKS_PER_S,
    has_signal,
    read_stat,
    read_status,
    threads,
)
from drumline.base.typed_json import from_json
from drumline.base.untrusted import parse_json
from drumline.watch.cluster_state import Collective
from drumline.watch.self_report import ANSWERING_THREAD, REPORT_SUFFIX, STACK_SIGNAL, WORKER_SIGNAL

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


@dataclass(frozen=True, kw_only=True)
class SelfReport:
    """The last report of a rank (watch/self_report.py); a rank that fails writes one without being
    asked."""

    number: int | None = None  # the number of the question that it answers
    calls: tuple[tuple[str, int | None, str], ...] = ()
    """File, line and name of the main thread's calls, the innermost first."""
    workers: tuple[
        tuple[int, int], ...
    ] = ()  # number and pid of each DataLoader worker that it waits for
    collectives: tuple[Collective, ...] = ()
    error: str = ""  # why the last two are missing


def read_report(folder: Path, rank: int) -> SelfReport:
    """Empty where there is none."""
    try:
        return from_json(
            SelfReport, parse_json((folder / f"rank-{rank:05d}.{REPORT_SUFFIX}").read_bytes())
        )
    except (OSError, ValueError):
        return SelfReport()


async def ask_report(
    folder: Path, rank: int, *, within_s: float = REPORT_WITHIN_S
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
    pid: int, file: Path, *, within_s: float = STACK_WITHIN_S, signal: int = STACK_SIGNAL
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
            return main_thread_stack(
                file.read_bytes()[:MAX_BYTES].decode(errors="replace"), _cwd(pid)
            )
    return ()


def _thread_to_ask(pid: int, signal: int) -> int | None:
    """A running main thread gets the signal itself, so that its stack does not change; a waiting
    one is not interrupted if another thread can answer."""
    status = read_status(pid)
    stat = read_stat(pid)
    if stat is None or stat.state in STOPPED or not has_signal(status, "SigCgt", signal):
        return None
    thread = pid
    if stat.state != "R":
        for number in threads(pid):
            thread_stat = read_stat(pid, number)
            if thread_stat is not None and thread_stat.name == ANSWERING_THREAD:
                thread = number
                break
    status_of_thread = read_status(pid, thread)
    if status_of_thread.get("State", "D")[0] in ("D", *STOPPED, *EXITED):
        return None
    # A signal that is still pending is enough.
    return (
        None if any(has_signal(status_of_thread, kind, signal) for kind in _NOT_HANDLED) else thread
    )


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
    status = read_status(pid)
    stat = read_stat(pid)
    is_in = has_signal(status, "SigCgt", STACK_SIGNAL) and not has_signal(
        status, "SigCgt", WORKER_SIGNAL
    )
    if stat is None or stat.state != "S" or not is_in:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / TICKS_PER_S)


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
    if len(_ANSWER.findall(text)) > 1:  # a late answer of another process came in between
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
    if cwd and file.startswith(cwd.rstrip("/") + "/"):
        return file[len(cwd.rstrip("/")) + 1 :]
    return "/".join(file.split("/")[-2:]) if file.startswith("/") else file


def _cwd(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
