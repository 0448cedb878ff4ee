"""Processes as the whole machine sees them: who is whose child, what is in whose environment, who
is left over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# In the environment of all that a testbed starts: the process that made the testbed.
OWNER_VARIABLE = "DRUMLINE_TESTBED"
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def everyone() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - quick, as below


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty for a process that has
    exited."""
    with contextlib.suppress(*GONE):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def children(pid: int) -> list[int]:
    return [process for process in everyone() if parent(process) == pid]


def command(pid: int) -> str:
    """The words it was started with."""
    with contextlib.suppress(*GONE):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


def environment(pid: int) -> list[str]:
    """The `KEY=VALUE` words that a process was started with."""
    with contextlib.suppress(*GONE):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def namespace(pid: int | str, kind: str) -> str:
    """Which namespace a process is in, such as `net:[4026531840]`; empty for one that is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115 - quick: asked of every process, often
    except GONE:
        return ""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
    """A condition that takes long to evaluate is evaluated less often: others need the cores."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        assert began < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(min(max(0.02, 5 * (time.monotonic() - began)), 0.5))


def owner_name(pid: int) -> str:
    """A name for a process that no other one will ever have: numbers are used again, start times
    tell them apart.

    The namespace tells apart equal numbers in two containers, each of which would look dead to the
    other.
    """
    return f"{pid}.{stat_fields(pid)[19]}.{namespace(pid, 'pid')}"


def remove_orphans() -> list[int]:
    """Kill what testbeds of dead processes left running; those of living ones, and all else, stay
    untouched."""
    here = namespace("self", "pid")
    orphans = []
    for pid in everyone():
        for word in environment(pid):
            if word.startswith(f"{OWNER_VARIABLE}=") and _is_dead(word.partition("=")[2], here):
                orphans.append(pid)
    send(orphans, signal.SIGKILL)
    return orphans


def _is_dead(owner: str, here: str) -> bool:
    words = owner.split(".", 2)
    if len(words) != 3 or words[2] != here:
        return False
    return stat_fields(int(words[0]))[19:20] != [words[1]]
