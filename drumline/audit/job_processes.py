"""Processes that are started here, and that all of them end: torchrun's agent, the ranks it starts, their workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from drumline.audit.end_with_parent import ending_with_parent

GRACE_S = 10.0
PROCESSES = Path("/proc")


class ProcessIdentity(NamedTuple):
    """A process; numbers are given out again, so its time of birth belongs to it."""

    pid: int
    born: int


class JobProcesses:
    """A command that runs, with everything it starts. When the context ends, none of it is left."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        with log.open("wb") as file:
            # A session of its own: a Ctrl-C is for us, and we then end it in order.
            self._root = subprocess.Popen(
                ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: set[ProcessIdentity] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._root.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._root.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None when it still runs after that time."""
        with suppress(subprocess.TimeoutExpired):
            return self._root.wait(timeout_s)
        return None

    def kill(self, pids: Sequence[int]) -> None:
        """End some of it with -9, at once."""
        # What a killed rank has started outlives it; it is ended with the rest.
        self._known |= descendants(self._root.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End what is left: in order if it can be, which lets torchrun's agent end its ranks."""
        if self._root.poll() is None:
            self._known |= descendants(self._root.pid)
            self._root.terminate()
            if self.wait(GRACE_S) is None:
                self._known |= descendants(self._root.pid)
                self._root.kill()
                self._root.wait()
        for one in self._known:
            if _birth(one.pid) == one.born:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)


def descendants(pid: int) -> set[ProcessIdentity]:
    """The children of a process, and theirs. Where there is no /proc, none are seen."""
    children: dict[int, list[ProcessIdentity]] = {}
    for entry in PROCESSES.iterdir() if PROCESSES.is_dir() else ():
        if entry.name.isdecimal() and (found := _stat(int(entry.name))) is not None:
            children.setdefault(int(found[1]), []).append(ProcessIdentity(int(entry.name), int(found[19])))
    found_so_far: set[ProcessIdentity] = set()
    parents = [pid]
    while parents:
        for child in children.get(parents.pop(), []):
            found_so_far.add(child)
            parents.append(child.pid)
    return found_so_far


def _birth(pid: int) -> int | None:
    found = _stat(pid)
    return None if found is None else int(found[19])


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process, from its state on; its name may hold anything and is left out."""
    try:
        return (
            (PROCESSES / str(pid) / "stat")
            .read_text(errors="replace", encoding="utf-8")
            .rpartition(")")[2]
            .split()
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
