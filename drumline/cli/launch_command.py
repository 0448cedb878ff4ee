"""`drumline launch [where] TASK|SCRIPT.py [args]`: starts a job's ranks here or on other hosts, or shows how to.

Slurm and Kubernetes are in launch_cluster.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.cli.launch_cluster import run_as_node, submit_to_slurm, write_manifest
from drumline.cli.launch_flags import GROUPS, OWN_FLAGS, wrong_flags, wrong_target
from drumline.cli.launch_request import LaunchRequest, launch_folder
from drumline.cli.train_command import run_name
from drumline.config import read_flags
from drumline.config.fields import SWITCHES
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.launch.env_file import NodeSettings, node_from_settings, read_env_file, settings_defaults
from drumline.launch.hosts import Host, hosts_from_file, hosts_from_flag, least_nodes, spares_from_flag
from drumline.launch.node.guard import DEFAULT_GRACE_S, new_job
from drumline.launch.node_plan import DEFAULT_PORT, NodePlan, Program, nodes_of_hosts, torchrun_command
from drumline.launch.ssh.client import ssh_client
from drumline.launch.ssh.hosts_job import HostsJob, variables_for_ranks, wrong_variables
from drumline.launch.ssh.hosts_launcher import run_on_hosts
from drumline.launch.ssh.sync import Sync
from drumline.launch.startup import default_procs
from drumline.launch.topology import topology_from
from drumline.net.secrets import secret_from
from drumline.terminal import print_message, show
from drumline.text import plural

USAGE = """\
usage: drumline launch [where] [flags] TASK|SCRIPT.py [arguments]

Starts a task, or any script that torchrun could start, with torchrun's own
agent. Flags of the launch come before the name, arguments of the task or script
after it.

  drumline launch --procs 8 train.py --epochs 3       8 ranks on this machine
  drumline launch --hosts a,b:4 --procs 8 digits      8 on a, 4 on b, over ssh
  drumline launch --watch --procs 8 train.py          hangs are reported by rank
  drumline launch --env-file .env digits              this node of a job
  drumline launch --slurm --nodes 2 --time 8:00:00 digits
  drumline launch --kubernetes --nodes 2 --image me/train:1 digits
  drumline launch --print --hosts a,b digits          what would be run, where

Test the hosts first: drumline doctor --hosts a,b
"""
EXIT_CODES = """\
exit codes: 0 success, 2 wrong usage, 3 a host is unreachable or the rendezvous
            failed, 70 the run hangs and was stopped, 75 preempted by a signal,
            and saved, 130 interrupted; otherwise that of the rank that failed
            first (1 when a signal ended it, or its host was lost)
"""


def run(argv: Sequence[str]) -> int:
    """The verb. All mistakes in the command are reported before torch is imported."""
    own, target, arguments = split_command(argv)
    flags = read_flags(own, OWN_FLAGS, no_settings="a setting of the task goes after its name")
    if flags.own.get("help"):
        show(_help(), end="")
        return ExitCode.SUCCESS
    if problems := [*wrong_flags(flags), *wrong_target(flags, target)]:
        raise ConfigError(problems, next_step="`drumline launch --help` lists all flags")
    assert target is not None
    request = LaunchRequest(flags.own, target, arguments)
    if flags.own.get("kubernetes"):
        return write_manifest(request)
    if flags.own.get("slurm"):
        return submit_to_slurm(request)
    if flags.own.get("srun"):
        return run_as_node(request)
    if "hosts" in flags.own or "hostfile" in flags.own:
        return _launch_on_hosts(request)
    return _launch_here(request)


def split_command(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The verb's own flags, the task or script, and the arguments of that, untouched."""
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "--":
        flag, equals, _ = argv[position].partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else "-"
        is_switch = OWN_FLAGS.get(flag.removeprefix("--"), (str,))[0] is bool or flag in ("-h", "--help")
        takes_next = following.lower() in SWITCHES if is_switch else not following.startswith("-")
        position += 2 if takes_next and not equals else 1
    own = list(argv[:position])
    rest = list(argv[position + 1 :] if argv[position : position + 1] == ["--"] else argv[position:])
    return own, rest[0] if rest else None, rest[1:]


def _launch_here(request: LaunchRequest) -> int:
    """All of a job, or one node of it by an --env-file or by flags."""
    given, settings = request.given, _node_settings(request)
    if settings is None:
        node, defaults = NodePlan(num_procs=given.get("procs"), max_restarts=request.restarts()), []
    else:
        node = _node(request, settings)
        defaults = settings_defaults(settings, run_name(request.target))
    program = request.program(*defaults)
    if given.get("print"):
        _print_nodes(node, program, settings)
        return ExitCode.SUCCESS
    # A Kubernetes operator sets RANK in every pod; --node-rank overrides that.
    if "node-rank" not in given and topology_from(os.environ) is not None:
        raise UsageError(
            "drumline launch starts ranks itself, but a launcher has started this process as a rank",
            next_step="run it without torchrun or srun",
        )
    if settings is not None:
        os.environ.update(settings.variables)
    secret = secret_from(os.environ)
    if node.num_nodes > 1:
        print_message(f"node {node.node_rank} of {node.num_nodes} joins at {node.endpoint}", stream=sys.stdout)

    from drumline.launch.node.local import run_node

    return run_node(node, program, supervision=request.supervision(secret))


def _node_settings(request: LaunchRequest) -> NodeSettings | None:
    """This node, from a file or the flags; None if it is all of the job."""
    given = request.given
    if "env-file" in given:
        return read_env_file(Path(given["env-file"]))
    if "node-rank" not in given or given.get("nodes", 1) == 1:
        return None
    host, _, port = given.get("master", "").partition(":")
    return NodeSettings(
        num_nodes=given.get("nodes", 1),
        node_rank=given["node-rank"],
        num_procs=given.get("procs"),
        master_addr=host,
        master_port=int(port or DEFAULT_PORT),
    )


def _node(request: LaunchRequest, settings: NodeSettings) -> NodePlan:
    given = request.given
    known_from = given.get("env-file", "--nodes")
    least = least_nodes(given.get("nnodes"), settings.num_nodes, known_from=known_from) or settings.min_nodes
    node = node_from_settings(
        settings, max_restarts=request.restarts(least), min_nodes=least, address=given.get("address")
    )
    return request.with_timeouts(node)


def _print_nodes(node: NodePlan, program: Program, settings: NodeSettings | None) -> None:
    """The torchrun line of each node; whether the others have as many ranks is not known here."""
    if settings is not None and settings.other_names:
        show(f"# with these in the environment: {', '.join(settings.other_names)}")
    if node.num_procs is None:
        node = replace(node, num_procs=default_procs())
    if settings is None or node.num_nodes == 1:
        show(shlex.join(torchrun_command(node, program)), is_data=True)
        return
    show("# torchrun alone numbers nodes by their addresses; give each its own number of ranks")
    for rank in range(node.num_nodes):
        address = settings.master_addr if rank == 0 else None
        one = node if rank == node.node_rank else replace(node, node_rank=rank, address=address)
        show(f"# node {rank} of {node.num_nodes}{', this one' if one is node else ''}")
        show(shlex.join(torchrun_command(one, program)), is_data=True)


def _launch_on_hosts(request: LaunchRequest) -> int:
    """Start the job over ssh and stay with it; with --print show the line to run on each host."""
    given = request.given
    listed = given.get("hosts")
    hosts = hosts_from_file(Path(given["hostfile"])) if listed is None else hosts_from_flag(listed)
    spares = spares_from_flag(given["spare"], hosts) if "spare" in given else []
    program = request.program()
    least = least_nodes(given.get("nnodes"), len(hosts), known_from="the list of hosts")
    nodes = nodes_of_hosts(
        hosts,
        num_procs=given.get("procs"),
        port=given.get("port", DEFAULT_PORT),
        max_restarts=request.restarts(least),
        min_nodes=least,
        job=new_job(),
    )
    nodes = [request.with_timeouts(node) for node in nodes]
    if given.get("print"):
        for host, node in zip(hosts, nodes, strict=True):
            show(f"# {host.name}")
            show(shlex.join(torchrun_command(node, program)), is_data=True)
        return ExitCode.SUCCESS
    if problems := list(wrong_variables(given.get("env", []), os.environ)):
        raise ConfigError(problems)
    job = _hosts_job(request, hosts, nodes, program, spares)
    if given.get("sync"):
        all_hosts = [*hosts, *spares]
        print_message(f"copying {job.cwd} to {plural(len(all_hosts), 'host')} with rsync", stream=sys.stdout)
        sync = Sync(job.cwd, job.client, job.python, job.python_path)
        digest = sync.run(all_hosts, given.get("exclude", []))
        print_message(f"the code is the same on all hosts ({digest[:12]})", stream=sys.stdout)
    return run_on_hosts(job)


def _hosts_job(
    request: LaunchRequest, hosts: Sequence[Host], nodes: Sequence[NodePlan], program: Program, spares: Sequence[Host]
) -> HostsJob:
    given, name = request.given, nodes[0].job
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
        task_logs=None if program.run is None else Path(program.run) / "logs",
        environment=variables_for_ranks(given.get("env", []), os.environ),
        grace_s=given.get("grace", DEFAULT_GRACE_S),
        min_nodes=nodes[0].min_nodes,
        script_watch=request.script_watch(logs),
        spares=spares,
        standby=given.get("standby", True),
    )


def _help() -> str:
    from drumline.config.help import render_flags

    return "\n".join([USAGE, render_flags(GROUPS, width=shutil.get_terminal_size().columns), EXIT_CODES])
