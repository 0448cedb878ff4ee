"""`drumline launch --hosts`: a job on several machines, started from this one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from drumline.cli import train_command
from drumline.cli.launch_program import (
    launch_folder,
    program_of,
    restarts_of,
    script_watch,
    watched,
    with_waits,
)
from drumline.config import Flags, read_flags
from drumline.errors import ConfigError, ExitCode
from drumline.launch.hosts import Host, hosts_from_file, hosts_from_flag, least_nodes, spares_from_flag
from drumline.launch.node.guard import GRACE_S, new_job
from drumline.launch.node_plan import DEFAULT_PORT, NodePlan, Program, nodes_of_hosts, torchrun_command
from drumline.launch.ssh.attempts import run_on_hosts
from drumline.launch.ssh.client import ssh_client
from drumline.launch.ssh.hosts_job import HostsJob, variables_for_ranks, wrong_variables
from drumline.launch.ssh.sync import Sync
from drumline.terminal import print_message, show


def launch_on_hosts(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """Start the job and stay with it; with --print show the line to run on each host."""
    listed, file = flags.own.get("hosts"), flags.own.get("hostfile")
    hosts = hosts_from_flag(listed) if listed is not None else hosts_from_file(Path(str(file)))
    spares = spares_from_flag(flags.own["spare"], hosts) if "spare" in flags.own else []
    program, name = watched(program_of(target, arguments), flags), new_job()
    least = least_nodes(flags.own.get("nnodes"), len(hosts), known_from="the list of hosts")
    nodes = nodes_of_hosts(
        hosts,
        num_procs=flags.own.get("procs"),
        port=flags.own.get("port", DEFAULT_PORT),
        max_restarts=restarts_of(flags, target, least),
        min_nodes=least,
        job=name,
    )
    nodes = [with_waits(node, flags) for node in nodes]
    if flags.own.get("print"):
        for host, node in zip(hosts, nodes, strict=True):
            show(f"# {host.name}")
            show(shlex.join(torchrun_command(node, program)), is_data=True)
        return ExitCode.SUCCESS
    if problems := list(wrong_variables(flags.own.get("env", []), os.environ)):
        raise ConfigError(problems)
    job = _job(flags, hosts, nodes, program, spares)
    if flags.own.get("sync"):
        all_hosts = [*hosts, *spares]
        others = f"{len(all_hosts)} host{'s' if len(all_hosts) > 1 else ''}"
        print_message(f"copying {job.cwd} to {others} with rsync", stream=sys.stdout)
        sync = Sync(job.cwd, job.client, job.python, job.python_path)
        digest = sync.run(all_hosts, flags.own.get("exclude", []))
        print_message(f"the code is the same on all hosts ({digest[:12]})", stream=sys.stdout)
    return run_on_hosts(job)


def _job(
    flags: Flags, hosts: Sequence[Host], nodes: Sequence[NodePlan], program: Program, spares: Sequence[Host]
) -> HostsJob:
    given, name = flags.own, nodes[0].job
    logs = Path(given.get("logs") or launch_folder(name))
    return HostsJob(
        job=name,
        hosts=hosts,
        nodes=nodes,
        program=program,
        client=ssh_client(given.get("ssh"), os.environ),
        python=given.get("python", sys.executable),
        python_path=os.environ.get("PYTHONPATH"),
        cwd=Path.cwd(),
        logs=logs,
        task_logs=_run_folder(program) / "logs" if program.is_task else None,
        environment=variables_for_ranks(given.get("env", []), os.environ),
        grace_s=given.get("grace", GRACE_S),
        min_nodes=nodes[0].min_nodes,
        script_watch=script_watch(flags, logs),
        spares=spares,
        standby=given.get("standby", True),
    )


def _run_folder(program: Program) -> Path:
    flags = read_flags(program.words[1:], train_command.OWN_FLAGS, max_positional=1)
    return train_command.run_folder(flags, program.words[1])
