"""A set of namespaces and the process that holds them: when it exits, so do all processes in them.

The kernel does the cleaning: the holder is process 1 of its own process namespace, so its end is
the end of every process in there, and with the last process go the mounts and links. It is told to
end when the process that made it ends, however that happens, `kill -9` included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from tests.multinode import processes
from tests.multinode.needs import tool

# Process 1 inherits every orphan; while it ignores their end, the kernel removes them and no zombie
# stays.
HOLD = "trap '' CHLD; echo ready; exec sleep infinity"


class Space:
    """Namespaces of its own for network, names, mounts and processes; `prepare` is shell run
    inside, once."""

    def __init__(self, name: str, prepare: str = ":") -> None:
        self.name = name
        unshare = (
            tool("unshare"),
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        )
        # The name is the shell's $0: it tells a person who reads `ps` whose this is.
        shell = ("sh", "-ec", f"{prepare}\n{HOLD}", f"testbed:{name}")
        self._holder = subprocess.Popen(
            [tool("setpriv"), "--pdeathsig", "KILL", *unshare, *shell],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables(),
        )
        assert self._holder.stdout
        with self._holder.stdout as words:
            answer = words.readline()
            if answer != "ready\n":
                raise RuntimeError(
                    f"{name} did not come up: {answer}{words.read()}(code {self._holder.wait()})"
                )
        (self.pid,) = processes.children(self._holder.pid)
        self._is_mine = processes.namespace(self.pid, "pid")
        self.apart = {self.pid}
        """Processes in here that belong to the testbed."""

    def inside(self, *kinds: str) -> list[str]:
        """The words to put before a command so that it runs in these namespaces; in all of them if
        none is named."""
        assert self.is_open(), f"{self.name} is off"
        chosen = kinds or ("net", "uts", "mount", "pid")
        return [tool("nsenter"), f"--target={self.pid}", *(f"--{kind}" for kind in chosen), "--"]

    def configure(self, command: Sequence[str], *, text: str | None = None) -> str:
        """Run one of this machine's network tools on the network in here; it must succeed."""
        done = subprocess.run(
            [*self.inside("net"), tool(command[0]), *command[1:]],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{self.name}: {' '.join(command)} failed: {done.stderr.strip()} {text or ''}"
            )
        return done.stdout

    def pids(self) -> list[int]:
        """All processes in here but the testbed's own, by the numbers that the whole machine knows
        them by."""
        inside = (
            pid for pid in processes.everyone() if processes.namespace(pid, "pid") == self._is_mine
        )
        return [pid for pid in inside if pid not in self.apart]

    def is_open(self) -> bool:
        return self._holder.poll() is None

    def kill(self) -> None:
        """The end of everything in here, at once."""
        if self.is_open():
            processes.send([self.pid], signal.SIGKILL)

    def close(self) -> None:
        """The end of everything in here; returns when it is gone."""
        self.kill()
        while self.is_open():
            # Process 1 waits for all others to be buried. One whose nsenter was killed has become
            # our child.
            for pid in set(processes.children(os.getpid())) & set(self.pids()):
                os.waitpid(pid, os.WNOHANG)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._holder.wait(0.02)


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of all that a testbed starts."""
    return {
        **os.environ,
        **(more or {}),
        processes.OWNER_VARIABLE: processes.owner_name(os.getpid()),
    }
