"""A node's agent as a program that the supervisor starts: `python -m
drumline.launch.ssh.agent_process FD SUPERVISOR`.

It reads from stdin what is to run, loads torch while the processes of its ranks do, then reads its
node, with the place of the rendezvous, which is sent when all hosts have answered. It writes starts
and failures of ranks to the pipe FD, and exits when the supervisor does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.processes import end_with_parent
from drumline.base.rank_environment import ScriptWatch
from drumline.base.startup import load_torch_quietly
from drumline.base.untrusted import from_json
from drumline.launch.node.local import limit_threads, run_node
from drumline.launch.node.standby import Standby
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.net.frames import FrameWriter


def main(fd: int, supervisor: int) -> int:
    """`fd`: the pipe to the supervisor, whose pid is `supervisor`; the agent's exit code."""
    if not end_with_parent(supervisor):
        return 1

    os.set_inheritable(fd, False)
    logging.disable(logging.CRITICAL)  # our messages replace those of torch's agent
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    program = from_json(Program, spec["program"])
    num_procs = spec["node"]["num_procs"]
    standby = None
    if spec["standby"] and program.is_task and num_procs is not None:
        limit_threads(num_procs)
        standby = Standby(program.python_arguments(), count=num_procs)
        standby.fill(at_once=True)  # they load torch while this process does

    load_torch_quietly()
    import drumline.launch.node.agent  # noqa: F401 - most of the time it takes to start

    node = sys.stdin.readline()
    if not node:  # ended before it
        return ExitCode.INTERRUPTED

    script_watch = spec["script_watch"] and from_json(ScriptWatch, spec["script_watch"])
    status = FrameWriter(fd)
    supervision = Supervision(
        **{name: spec[name] for name in ("job", "grace_s", "secret", "first_start")},
        folder=Path(spec["logs"]),
        report=status.send,
        script_watch=script_watch,
        standby=standby,
    )
    try:
        return run_node(from_json(NodePlan, json.loads(node)), program, supervision)
    except DrumlineError as error:
        status.send("error", text=str(error), lost_first_node=error.lost_first_node)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
