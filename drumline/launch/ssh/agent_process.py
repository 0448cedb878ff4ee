"""A node's agent as its supervisor starts it: for an attempt that begins, or for the next one, with torch loaded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.launch.node import guard
from drumline.launch.rank_environment import RESTARTED
from drumline.net.frames import MAX_PIPE_BYTES, FrameReader, encode
from drumline.processes import descendants
from drumline.untrusted import open_append


class AgentProcess:
    """`python -m drumline.launch.ssh.node_job`: it loads at once, and runs ranks when it is told to start."""

    def __init__(self, spec: Mapping[str, Any], log: Path, *, waits: bool = False) -> None:
        """`waits`: for the attempt after that of `spec`. It carries the name of that one, so it does not end with this
        one."""
        reading, writing = os.pipe()
        mark = {guard.VARIABLE: spec["next_job"], RESTARTED: "1"} if waits else {guard.VARIABLE: spec["job"]}
        try:
            with open_append(log) as file:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "drumline.launch.ssh.node_job", str(writing), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **spec["environment"], **mark},
                    pass_fds=[writing],
                    start_new_session=True,
                )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.status = FrameReader(reading, max_bytes=MAX_PIPE_BYTES)
        """Starts and failures of its ranks."""
        self._send({**spec, "environment": {}, "waits": waits})

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def start(self, spec: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        """All hosts are there: it may start its ranks."""
        self._send({**spec, "kind": "start", "environment": {}, "node": node})
        self.close()

    def close(self) -> None:
        """No more comes on its stdin: one that waits exits."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def all_of_it(self) -> set[int]:
        """Its process, and those that it has started."""
        return {self.process.pid, *descendants(self.process.pid)}

    def _send(self, frame: Mapping[str, Any]) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):  # it was killed, or closed
            self.process.stdin.write(encode(frame) + b"\n")
            self.process.stdin.flush()
