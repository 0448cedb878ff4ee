"""`drumline launch` on this machine: all of a job, or one node of it by an `--env-file` or by flags."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.cli import train_command
from drumline.cli.launch_program import program_of, restarts_of, supervision_of, watched, with_waits
from drumline.config import Flags
from drumline.errors import ExitCode, UsageError
from drumline.launch.env_file import NodeSettings, node_from_settings, read_env_file, settings_defaults
from drumline.launch.hosts import least_nodes
from drumline.launch.node_plan import DEFAULT_PORT, NodePlan, Program, torchrun_command
from drumline.launch.topology import topology_from
from drumline.net.secrets import secret_from
from drumline.terminal import print_message, show


def run_here(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; with --print say how."""
    settings = _settings(flags)
    if settings is None:
        node, defaults = (
            NodePlan(num_procs=flags.own.get("procs"), max_restarts=restarts_of(flags, target)),
            [],
        )
    else:
        node = _node(flags, target, settings)
        defaults = settings_defaults(settings, train_command.run_name(target))
    program = watched(program_of(target, arguments, *defaults), flags)
    if flags.own.get("print"):
        _print_nodes(node, program, settings)
        return ExitCode.SUCCESS
    # An operator in Kubernetes gives every pod a RANK; who says which node this is knows better.
    if "node-rank" not in flags.own and topology_from(os.environ) is not None:
        raise UsageError(
            "drumline launch starts ranks itself, but a launcher has started this process as one",
            next_step="run it without torchrun or srun",
        )
    if settings is not None:
        os.environ.update(settings.variables)
    secret = secret_from(os.environ)
    if node.num_nodes > 1:
        print_message(f"node {node.node_rank} of {node.num_nodes} goes to {node.endpoint}", stream=sys.stdout)

    from drumline.launch.node.local import run_node

    return run_node(node, program, supervision=supervision_of(flags, secret))


def _settings(flags: Flags) -> NodeSettings | None:
    """What a file or the flags say of this node; None when it is all of the job."""
    given = flags.own
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


def _node(flags: Flags, target: str, settings: NodeSettings) -> NodePlan:
    known_from = flags.own.get("env-file", "--nodes")
    least = least_nodes(flags.own.get("nnodes"), settings.num_nodes, known_from=known_from)
    least = least or settings.min_nodes
    node = node_from_settings(
        settings,
        max_restarts=restarts_of(flags, target, least),
        min_nodes=least,
        address=flags.own.get("address"),
    )
    return with_waits(node, flags)


def _print_nodes(node: NodePlan, program: Program, settings: NodeSettings | None) -> None:
    """The line of each node; of the others it is not known here whether they have as many ranks."""
    if settings is not None and settings.other_names:
        show(f"# with these in the environment: {', '.join(settings.other_names)}")
    if node.num_procs is None:
        from drumline.launch.node.local import default_procs

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
