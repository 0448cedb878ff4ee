"""What srun says about a task, in torchrun's words.

srun starts every rank itself and sets SLURM_PROCID and its kin, but no address to meet at: that is the step's first
host, and a port that follows from the job's number, so that two jobs on one host do not collide. Or srun starts one
task on each node (`drumline launch --srun`), which starts that node's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from drumline.errors import PreflightError, UsageError
from drumline.launch.cluster.node_list import node_names
from drumline.launch.torchrun import Node

FIRST_PORT = 20_000
NUM_PORTS = 20_000


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK and its kin for a task of an srun step; nothing anywhere else (a batch script is no step of its own)."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _first_count(environment.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_port(environment)),
        "DRUMLINE_NODE_NAMES": _names(environment),
    }


def node_of_step(environment: Mapping[str, str], *, num_procs: int | None) -> Node:
    """This process's node of a step that has one task on each."""
    names = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if missing := [name for name in names if name not in environment]:
        raise UsageError(
            f"--srun: no srun has started this process: {', '.join(missing)} not set",
            next_step="srun --ntasks-per-node=1 drumline launch --srun ..., or drumline launch --slurm",
        )
    num_nodes, tasks = int(environment["SLURM_STEP_NUM_NODES"]), int(environment["SLURM_STEP_NUM_TASKS"])
    if tasks != num_nodes:
        raise UsageError(
            f"--srun: the step has {tasks} tasks on {num_nodes} nodes, but each node's ranks are started by one",
            next_step="srun --ntasks=$SLURM_NNODES --ntasks-per-node=1, and say with --procs how many ranks a node has",
        )
    if num_nodes == 1:
        return Node(num_procs=num_procs)
    first, node_rank = first_host(environment["SLURM_STEP_NODELIST"]), int(environment["SLURM_NODEID"])
    return Node(
        num_nodes=num_nodes,
        node_rank=node_rank,
        num_procs=num_procs,
        endpoint=f"{first}:{_port(environment)}",
        address=first if node_rank == 0 else None,
        peers=tuple(node_names(environment["SLURM_STEP_NODELIST"])),
    )


def _port(environment: Mapping[str, str]) -> int:
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * 7 + step) % NUM_PORTS


def first_host(node_list: str) -> str:
    """The first name of Slurm's shorthand: `gpu[007-009,12],login` begins with `gpu007`."""
    match = re.match(
        r"^(?P<prefix>[^\[\],]+)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,\[\]]*))?(,|$)", node_list
    )
    if match is None:
        raise PreflightError(
            f"SLURM_STEP_NODELIST is {node_list!r}, in which no first host can be found",
            next_step="set MASTER_ADDR to the first host of the job",
        )
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")


def _names(environment: Mapping[str, str]) -> str:
    """The hosts in the order of their ranks; nothing where ranks are not dealt in equal blocks."""
    is_even = "," not in environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    in_blocks = environment.get("SLURM_DISTRIBUTION", "block").startswith("block")
    return ",".join(node_names(environment["SLURM_STEP_NODELIST"])) if is_even and in_blocks else ""


def _first_count(tasks_per_node: str) -> str:
    """`4(x2),3` means four tasks on each of two nodes and three on one more."""
    return re.split(r"[(,]", tasks_per_node, maxsplit=1)[0]
