"""`drumline launch --hosts`: a job on several machines, started from this one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drumline.cli.launch_program import program_of, restarts_of
from drumline.config import Flags
from drumline.errors import ExitCode
from drumline.launch.hosts import hosts_from_file, hosts_from_flag
from drumline.launch.plan import nodes_of_hosts
from drumline.launch.torchrun import DEFAULT_PORT, torchrun_command


def run_on_hosts(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """Show the line to run on each host."""
    listed, file = flags.own.get("hosts"), flags.own.get("hostfile")
    hosts = hosts_from_flag(listed) if listed is not None else hosts_from_file(Path(str(file)))
    program = program_of(target, arguments)
    nodes = nodes_of_hosts(
        hosts,
        num_procs=flags.own.get("procs"),
        port=flags.own.get("port", DEFAULT_PORT),
        max_restarts=restarts_of(flags, target),
    )
    for host, node in zip(hosts, nodes, strict=True):
        print(f"# {host.name}")
        print(shlex.join(torchrun_command(node, program)))
    return ExitCode.SUCCESS
