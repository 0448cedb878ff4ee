"""Stops processes while another row is measured, and resumes them even if the rank is killed.

If a rank is killed in the middle of a block, the processes that it has stopped would stay stopped
forever. So a small guard process knows them too, and resumes them when the rank has exited; they
then notice that themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache

# It sleeps until the rank writes a pid or exits. Waiting for the end of its input is not enough:
# workers that were forked from the rank hold the other end too.
PROGRAM = """
import os, select, signal, sys
ended, pids = os.pidfd_open(int(sys.argv[1])), b""
os.write(1, b"!")
while True:
    ready, _, _ = select.select([0, ended], [], [])
    more = os.read(0, 4096) if 0 in ready else b""
    if not more:
        break
    pids += more
for pid in set(pids.split()):
    try:
        os.kill(int(pid), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def stop(pid: int) -> None:
    """Stop a process until `resume`, or until this process exits."""
    guard = _guard()
    assert guard.stdin is not None
    guard.stdin.write(f"{pid}\n".encode())
    _signal(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@cache
def _guard() -> subprocess.Popen[bytes]:
    """In a new session, so that a signal to the rank's group does not end it."""
    command = [sys.executable, "-S", "-c", PROGRAM, str(os.getpid())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.read(1)  # from here on it notices the exit of this process
    return process
