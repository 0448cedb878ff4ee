"""Processes that are stopped while another way is at work, and that go on in any case.

A rank may be killed in the middle of a block. What it has stopped could then never end: nobody would be left who knows
of it. So a small process beside the rank knows it too, and when the rank is gone, in whatever way, lets all go on.
They then see by themselves that the rank is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache

# It sleeps until the rank says something or ends. The end of its input alone may never come: workers that were forked
# from the rank hold the other end too.
PROGRAM = """
import os, select, signal, sys
ended, told = os.pidfd_open(int(sys.argv[1])), b""
os.write(1, b"!")
while True:
    ready, _, _ = select.select([0, ended], [], [])
    more = os.read(0, 4096) if 0 in ready else b""
    if not more:
        break
    told += more
for pid in set(told.split()):
    try:
        os.kill(int(pid), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def stop(pid: int) -> None:
    """Until `let_go_on`, or until this process has ended."""
    beside = _beside()
    assert beside.stdin is not None
    beside.stdin.write(f"{pid}\n".encode())
    _signal(pid, signal.SIGSTOP)


def let_go_on(pid: int) -> None:
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@cache
def _beside() -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the rank is not to end it."""
    command = [sys.executable, "-S", "-c", PROGRAM, str(os.getpid())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.read(1)  # from here on it would see the end of this process
    return process
