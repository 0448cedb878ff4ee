"""Ends the processes of a job when its launcher has exited, even by `kill -9`.

All processes of a job have its name in their environment (DRUMLINE_JOB): ranks have their own
sessions, and processes that they start are found only by that name. Each launcher has a guard: this
file, as a process that needs only the standard library and `processes.py`, and waits until a pipe
that the launcher holds is closed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

JOB_ENV = "DRUMLINE_JOB"
DEFAULT_GRACE_S = 15.0
SUCCEEDED = b"succeeded"


def new_job() -> str:
    return secrets.token_hex(8)


def job_processes(*jobs: str) -> list[int]:
    """The processes of these jobs, except this one."""
    from drumline.base.processes import processes_with_variable

    return processes_with_variable(*(f"{JOB_ENV}={job}" for job in jobs))


class Guard:
    """While it is open, the job ends when this process ends."""

    def __init__(self, job: str, grace_s: float, *, folder: str = "") -> None:
        """`folder`: removed with the job."""
        # Without the environment: if a job runs inside a job, the outer guard must not end the
        # inner one's guard.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job, str(grace_s), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )

    def close(self, *, has_succeeded: bool) -> None:
        """Call it when the job is done. Processes that a successful job left running on purpose are
        not ended."""
        with contextlib.suppress(OSError):
            self._process.communicate(SUCCEEDED if has_succeeded else b"")


def main(job: str, grace_s: str, folder: str) -> None:
    """The guard itself: wait for the launcher, then end what is left of the job."""
    # Slurm and terminals signal every process of the job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    # this process has no path to the package
    sys.path.append(str(Path(__file__).parents[3]))
    from drumline.base.processes import Termination

    if sys.stdin.buffer.read() != SUCCEEDED:  # it failed, or the launcher died
        # The launcher itself may have the name, and waits for us if it still runs.
        Termination(lambda: {*job_processes(job)} - {os.getppid()}, float(grace_s)).wait()

    if folder:
        import shutil  # not before: a guard starts beside every job

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
