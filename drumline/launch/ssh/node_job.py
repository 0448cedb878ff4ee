"""A node's job as its supervisor starts it: `python -m drumline.launch.ssh.node_job FD SUPERVISOR`, the node's agent.

It reads from stdin what is to run, loads torch beside the processes that will be its ranks, then reads where the nodes
meet: that comes when all hosts are there, or, where it waits for the next attempt, when that begins. It writes starts
and failures of ranks to the pipe FD. It ends when the supervisor does: the kernel sends it a SIGTERM then, the agent
ends its ranks, and the guard beside it ends whatever is left.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from drumline.errors import DrumlineError, ExitCode
from drumline.launch.node.supervision import Supervision
from drumline.launch.node_plan import NodePlan, Program
from drumline.launch.rank_environment import ScriptWatch
from drumline.net.frames import FrameWriter

PR_SET_PDEATHSIG = 1
# How often an agent that waits looks whether another of its ranks may load.
FILL_S = 1.0


def main(fd: int, supervisor: int) -> int:
    """Run the job that stdin describes."""
    _end_with(supervisor)
    os.set_inheritable(fd, False)
    logging.disable(logging.CRITICAL)  # torch's agent tells what we tell better

    from drumline.launch.node.local import load_agent, run_node, standby_for

    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - what is not read yet can be waited for
    spec: dict[str, Any] = json.loads(stdin.readline())
    program = Program(**{**spec["program"], "words": tuple(spec["program"]["words"])})
    waits, num_procs = spec["waits"], spec["node"]["num_procs"]
    standby = standby_for(program, num_procs, at_once=not waits) if spec["standby"] else None
    load_agent()
    while waits and standby is not None and not select.select([stdin], [], [], FILL_S)[0]:
        standby.fill()
    start = stdin.readline()
    if not start:  # ended before it, or not needed
        return ExitCode.INTERRUPTED
    spec = json.loads(start)
    status = FrameWriter(fd)
    supervision = Supervision(
        job=spec["job"],
        grace_s=spec["grace_s"],
        folder=Path(spec["logs"]),
        report=lambda frame: status.send(**frame),
        secret=spec["secret"],
        script_watch=ScriptWatch(**spec["script_watch"]) if spec["script_watch"] else None,
        first_start=spec["first_start"],
        standby=standby,
    )
    try:
        return run_node(NodePlan(**spec["node"]), program, supervision=supervision)
    except DrumlineError as error:
        status.send("error", text=str(error))
        return error.exit_code


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it was gone already
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
