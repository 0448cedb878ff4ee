"""A node's agent as a separate process: how the supervisor starts and informs it, and what runs in
it.

The process (`python -m drumline.launch.ssh.agent_process FD SUPERVISOR`) reads from stdin what is
to run, loads torch while the processes of its ranks do, then reads where the rendezvous is, which
is sent when all hosts have answered. It writes starts and failures of ranks to the pipe FD, and
exits when the supervisor does.

A supervisor outlives an attempt and keeps an agent for the next one, which has loaded torch. It has
the next attempt's name from the start: the guard ends processes by the name in their environment,
which a process cannot change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.processes import end_with_parent
from drumline.base.rank_environment import RESTARTED, ScriptWatch
from drumline.base.startup import load_torch_quietly
from drumline.base.untrusted import open_append
from drumline.launch.node import guard
from drumline.launch.node.local import limit_threads, run_node
from drumline.launch.node.standby import Standby
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.net.frames import MAX_PIPE_BYTES, FrameReader, FrameWriter, encode

# How often a waiting agent checks whether the next of its ranks may load.
FILL_S = 1.0


class AgentProcess:
    """Loads torch at once, and runs ranks when `start` is called."""

    def __init__(self, spec: Mapping[str, Any], log: Path, *, waits: bool = False) -> None:
        """`waits`: for the attempt after that of `spec`. It has that one's name, so it does not end
        with this one."""
        reading, writing = os.pipe()
        mark = (
            {guard.JOB_ENV: spec["next_job"], RESTARTED: "1"}
            if waits
            else {guard.JOB_ENV: spec["job"]}
        )
        try:
            with open_append(log) as file:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "drumline.launch.ssh.agent_process",
                        str(writing),
                        str(os.getpid()),
                    ],
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
        """All hosts have answered: it may start its ranks."""
        self._send({**spec, "kind": "start", "environment": {}, "node": node})
        self.close()

    def close(self) -> None:
        """Close its stdin: a waiting agent then exits."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _send(self, frame: Mapping[str, Any]) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):  # it was killed, or closed
            self.process.stdin.write(encode(frame) + b"\n")
            self.process.stdin.flush()


def main(fd: int, supervisor: int) -> int:
    if not end_with_parent(supervisor):
        return 1
    os.set_inheritable(fd, False)
    logging.disable(logging.CRITICAL)  # our messages replace those of torch's agent
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered, so that `select` sees what is left
    spec: dict[str, Any] = json.loads(stdin.readline())
    program = Program(**{**spec["program"], "words": tuple(spec["program"]["words"])})
    waits = spec["waits"]
    num_procs = spec["node"]["num_procs"]
    standby = None
    if spec["standby"] and program.is_task and num_procs is not None:
        limit_threads(num_procs)
        standby = Standby(program.python_arguments(), count=num_procs)
        if not waits:  # they load torch while this process does
            standby.fill(at_once=True)
    load_torch_quietly()
    import drumline.launch.node.agent  # noqa: F401 - most of the time it takes to start

    while waits and standby is not None and not select.select([stdin], [], [], FILL_S)[0]:
        standby.fill()
    start = stdin.readline()
    if not start:  # ended before it, or not needed
        return ExitCode.INTERRUPTED
    spec = json.loads(start)
    status = FrameWriter(fd)
    supervision = Supervision(
        **{name: spec[name] for name in ("job", "grace_s", "secret", "first_start")},
        folder=Path(spec["logs"]),
        report=status.send,
        script_watch=ScriptWatch(**spec["script_watch"]) if spec["script_watch"] else None,
        standby=standby,
    )
    try:
        return run_node(NodePlan(**spec["node"]), program, supervision)
    except DrumlineError as error:
        status.send("error", text=str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
