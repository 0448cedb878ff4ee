"""Python processes on a host that have torch already: as tests/warm.py, with a server inside the
host.

A test that is not about a cold start asks for it with `make_testbed(..., warm=True)`, and starts
`host.python`.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests import warm
from tests.multinode import processes
from tests.ranks import server_context

# In the host's own /run: one path, which leads to the server of whichever host it is used on.
FOLDER = Path("/run/warm")
PROGRAM = FOLDER / "python"


class WarmHost:
    """The server of one host; it ends with the host."""

    def __init__(self, host_pid: int) -> None:
        self._control, theirs = server_context.Pipe()
        self._process: ForkServerProcess = server_context.Process(
            target=_serve, args=(host_pid, theirs)
        )
        self._process.start()
        theirs.close()
        self._control.recv()

    def pids(self) -> list[int]:
        """The server itself, not what it has started."""
        assert self._process.pid
        return processes.children(self._process.pid)

    def close(self) -> None:
        """After the host's end."""
        self._process.join()
        self._process.close()
        self._control.close()


def enter(host_pid: int, kinds: Sequence[str] = ("net", "uts", "mnt")) -> None:
    """As nsenter does it; all are opened first, because /proc is another one afterwards."""
    files = [os.open(f"/proc/{host_pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files:
        assert libc.setns(file, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(file)


def _serve(host_pid: int, control: Connection) -> None:
    enter(host_pid, ("net", "uts", "mnt", "pid"))
    child = os.fork()  # only a child is in the host's process namespace
    if child:
        os.waitpid(child, 0)
        return
    FOLDER.mkdir()
    words = {"python": sys.executable, "client": str(warm.CLIENT), "server": str(FOLDER / "server")}
    PROGRAM.write_text(
        warm.PROGRAM.format(**{name: shlex.quote(word) for name, word in words.items()})
    )
    PROGRAM.chmod(0o755)
    warm.serve(control, words["server"], str(PROGRAM))
    os._exit(0)
