"""Asks a process that tells nothing by itself for its Python stacks: by a signal, which it answers with Python's lock
held too."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drumline.processes import EXITED, STOPPED, TICKS_PER_S, has_signal, read_stat, read_status, threads
from drumline.watch.rank.stacks import ANSWERING, STACK_SIGNAL, WORKER_SIGNAL

WITHIN_S = 0.4
EVERY_S = 0.004
MAX_BYTES = 1 << 18
MAX_FRAMES = 48
OURS = "/drumline/"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_ANSWER = re.compile(r"^(Current thread |Stack )", re.MULTILINE)
# Python has no name for tgkill, and the C library only since 2.30.
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


async def stack_of(
    pid: int, file: Path, *, within_s: float = WITHIN_S, signal: int = STACK_SIGNAL
) -> tuple[str, ...]:
    """The calls that the main thread is in, the innermost first. Empty when the process cannot answer: it has no
    handler (the signal would end it), is stopped (the signal would wait for it), hangs in the kernel, or is gone.
    `signal`: WORKER_SIGNAL for what a rank has forked."""
    thread = _thread_to_ask(pid, signal)
    if thread is None:
        return ()
    with suppress(OSError):
        os.truncate(file, 0)
        _send(pid, thread, signal)
        if await _has_answered(pid, thread, within_s, signal):
            return main_thread(file.read_bytes()[:MAX_BYTES].decode(errors="replace"), _folder(pid))
    return ()


def in_fork_s(pid: int) -> float:
    """For how long a process that a rank has forked sleeps there without having left `fork`: it has the rank's handler,
    and has not registered its own. 0: it has left, or runs."""
    status, stat = read_status(pid), read_stat(pid)
    is_in = has_signal(status, "SigCgt", STACK_SIGNAL) and not has_signal(status, "SigCgt", WORKER_SIGNAL)
    if stat is None or stat.state != "S" or not is_in:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / TICKS_PER_S)


def described(pid: int, calls: Iterable[tuple[str, int | None, str]]) -> tuple[str, ...]:
    """Calls that a process has told of itself, in the same words."""
    folder = _folder(pid)
    return tuple(f"{shorten(file, folder)}:{line or '???'} in {name}" for file, line, name in calls)


def last_stack(file: Path) -> tuple[str, ...]:
    """What a process that a fatal signal ended has left there, behind an answer that it gave before."""
    try:
        text = file.read_bytes()[-MAX_BYTES:].decode(errors="replace")
    except OSError:
        return ()
    _, is_fatal, stacks = text.rpartition("Fatal Python error")
    return main_thread(stacks, "") if is_fatal else ()


def main_thread(text: str, folder: str) -> tuple[str, ...]:
    """The main thread's calls in what faulthandler wrote: the thread that is oldest is the last one there."""
    if len(_ANSWER.findall(text)) > 1:  # a late answer of another process came in between
        return ()
    frames: list[str] = []
    for line in text.splitlines():
        if "hread 0x" in line:
            frames = []
        elif match := _FRAME.match(line):
            frames.append(f"{shorten(match['file'], folder)}:{match['line']} in {match['name']}")
    return tuple(frames[:MAX_FRAMES])


def shorten(file: str, folder: str) -> str:
    """As much of a path as it takes to find the file: without the folder that the process is in, or without what is
    the same for all packages, or its last two parts."""
    for package in ("/site-packages/", "/dist-packages/"):
        if package in file:
            return file.rpartition(package)[2]
    if OURS in file:
        return file[file.rindex(OURS) + 1 :]
    if folder and file.startswith(folder.rstrip("/") + "/"):
        return file[len(folder.rstrip("/")) + 1 :]
    return "/".join(file.split("/")[-2:]) if file.startswith("/") else file


def _thread_to_ask(pid: int, signal: int) -> int | None:
    """A main thread that runs is asked itself, so that its stack stands still; one that waits is left alone where
    another thread can answer for it."""
    status, stat = read_status(pid), read_stat(pid)
    if stat is None or stat.state in STOPPED or not has_signal(status, "SigCgt", signal):
        return None
    thread = pid if stat.state == "R" else next((one for one in threads(pid) if _is_answering(pid, one)), pid)
    own = read_status(pid, thread)
    if own.get("State", "D")[0] in ("D", *STOPPED, *EXITED):
        return None
    # One that still waits to be handled is enough.
    return None if any(has_signal(own, kind, signal) for kind in ("SigBlk", "SigPnd", "ShdPnd")) else thread


def _is_answering(pid: int, thread: int) -> bool:
    stat = read_stat(pid, thread)
    return stat is not None and stat.name == ANSWERING


def _send(pid: int, thread: int, signal: int) -> None:
    if _TGKILL is None:
        os.kill(pid, signal)
    elif _libc.syscall(_TGKILL, pid, thread, signal):
        raise OSError(ctypes.get_errno(), "tgkill")


async def _has_answered(pid: int, thread: int, within_s: float, signal: int) -> bool:
    """The kernel tells: until it is handled a signal is pending, and while it is handled it is blocked."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        await asyncio.sleep(EVERY_S)
        status = read_status(pid, thread)
        if not status:
            return False
        if not any(has_signal(status, kind, signal) for kind in ("SigPnd", "ShdPnd", "SigBlk")):
            return True
    return False


def _folder(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
