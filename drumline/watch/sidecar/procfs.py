"""Processes as the kernel shows them in /proc: reads that never wait for the process, whatever it hangs in.

Files that need the lock of its memory (cmdline, environ, maps) are left alone: a process that hangs with that lock
held would hold up whoever reads them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

GONE = "X"
ENDED = ("Z", GONE)
STOPPED = ("T", "t")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """The parts of /proc/PID/stat that are looked at."""

    name: str
    state: str
    ticks: int
    """CPU time of all its threads."""
    num_threads: int
    start: int
    """In ticks since the machine's start."""
    exit_status: int
    """As wait() gives it; 0 as well where it may not be read."""


def parse_stat(text: bytes) -> Stat:
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return Stat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(),
        ticks=int(fields[11]) + int(fields[12]),
        num_threads=int(fields[17]),
        start=int(fields[19]),
        exit_status=int(fields[49]),
    )


def read_stat(pid: int, thread: int | None = None) -> Stat | None:
    """None: there is no such process, or no such thread of it."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    text = _read(path)
    return parse_stat(text) if text else None


def read_status(pid: int, thread: int | None = None) -> dict[str, str]:
    """/proc/PID/status by its names; empty when there is no such process."""
    text = _read(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status")
    pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def threads(pid: int) -> list[int]:
    try:
        with os.scandir(f"/proc/{pid}/task") as found:
            return [int(thread.name) for thread in found]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Of all its threads: each of them may have started some."""
    lists = (_read(f"/proc/{pid}/task/{thread}/children") for thread in threads(pid))
    return [int(child) for found in lists for child in found.split()]


def moved_bytes(pid: int) -> int | None:
    """What it has read and written so far, by calls and on disks; None where that may not be known."""
    words = _read(f"/proc/{pid}/io").split()
    # rchar, wchar, read_bytes, write_bytes; between them are numbers of calls.
    return sum(int(words[place]) for place in (1, 3, 9, 11)) if len(words) > 11 else None


def tracer(pid: int) -> str:
    """Who debugs it; empty when nobody does."""
    number = int(read_status(pid).get("TracerPid", "0"))
    if not number:
        return ""
    stat = read_stat(number)
    return f"{stat.name} (process {number})" if stat else f"process {number}"


class Process:
    """One process, by descriptors that stay with it: when its number is used again, this one is still gone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat: int | None = None
        self.end_fd: int | None = None
        """Becomes readable when the process ends."""
        with suppress(OSError):
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            self.end_fd = os.pidfd_open(pid)

    def stat(self) -> Stat | None:
        if self._stat is None:
            return None
        try:
            return parse_stat(os.pread(self._stat, 4096, 0))
        except OSError:
            return None

    def close(self) -> None:
        for fd in (self._stat, self.end_fd):
            if fd is not None:
                os.close(fd)
        self._stat = self.end_fd = None


def _read(path: str) -> bytes:
    """Empty when the process is gone or not ours to read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""
    finally:
        os.close(fd)
