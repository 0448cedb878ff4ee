"""Ends what a launcher has started when the launcher itself is gone, `kill -9` included.

All processes of a job carry its name in their environment (DRUMLINE_JOB): ranks have sessions of their own, and what
they start is found by that word alone. Beside a launcher runs a guard: this file, as a process that knows only the
standard library and waits for the end of a pipe that the launcher holds. A word on the pipe says that the job ended in
order; the bare end of it says that it failed or the launcher died, and then the guard ends what is left. Either way it
takes the job's own folder away.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

VARIABLE = "DRUMLINE_JOB"
GRACE_S = 15.0
# A process that the kernel cannot end (it waits for a device) is not waited for.
KILL_WAIT_S = 5.0
IN_ORDER = b"in order"


def new_job() -> str:
    """A name that no other job has."""
    return secrets.token_hex(8)


def marked(*jobs: str) -> list[int]:
    """The processes that carry the name of one of these jobs, this one apart."""
    words = {f"{VARIABLE}={job}".encode() for job in jobs}
    found = (pid for pid in _everyone() if words.intersection(_read(pid, "environ").split(b"\0")))
    return [pid for pid in found if pid != os.getpid()]


def descendants(pid: int) -> list[int]:
    """What this process has started, and what those have; those that changed their environment too."""
    parents = {other: parent_of(other) for other in _everyone()}
    found, new = [], [pid]
    while new := [other for other, parent in parents.items() if parent in new]:
        found += new
    return found


def parent_of(pid: int) -> int:
    """0 for a process that is gone, or only waits to be buried."""
    state, parent = (_read(pid, "stat").rpartition(b")")[2].split() or [b"Z", b"0"])[:2]
    return 0 if state == b"Z" else int(parent)


class Ending:
    """SIGTERM to the topmost of some processes, who tell their own; when the grace is over, SIGKILL to all."""

    def __init__(self, find: Callable[[], Iterable[int]], grace_s: float) -> None:
        self._find = find
        self._deadline = time.monotonic() + grace_s
        self._told: set[int] = set()

    def hurry(self, grace_s: float) -> None:
        """From now on there is no more time than this."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def step(self) -> bool:
        """To be called again and again, until it says that all have ended; or cannot be made to."""
        left, now = set(self._find()), time.monotonic()
        if now >= self._deadline:
            _send(left, signal.SIGKILL)
        else:
            # What an ended process leaves behind is topmost then.
            tops = {pid for pid in left if parent_of(pid) not in left} - self._told
            self._told |= tops
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that was stopped would not hear the first
                _send(tops, number)
        return not left or now >= self._deadline + KILL_WAIT_S

    def finish(self) -> None:
        while not self.step():
            time.sleep(0.05)


class Guard:
    """As long as it is open, the end of this process is the end of the job."""

    def __init__(self, job: str, grace_s: float = GRACE_S, *, folder: str = "") -> None:
        """`folder`: goes with the job."""
        # Without the environment: the guard of a job inside a job must outlive what the outer one's guard ends.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job, str(grace_s), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )

    def close(self, *, in_order: bool) -> None:
        """When the job is done. What a job that went well has left running on purpose may stay."""
        with contextlib.suppress(OSError):
            self._process.communicate(IN_ORDER if in_order else b"")


def main(job: str, grace_s: str, folder: str) -> None:
    """The guard: started before the first rank, and there until the launcher has ended."""
    # Slurm and a terminal signal every process of the job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != IN_ORDER:
        # The launcher itself may carry the name, and waits for us when it is still there.
        Ending(lambda: {*marked(job)} - {os.getppid()}, float(grace_s)).finish()
    if folder:
        import shutil  # not before: a guard starts beside every job

        shutil.rmtree(folder, ignore_errors=True)


def _everyone() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - it starts fast


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
