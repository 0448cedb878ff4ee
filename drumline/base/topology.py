"""Which rank this process is, from the variables of its launcher; no rank reads them elsewhere.

torchrun sets RANK and the rest, and so do most other launchers. Slurm's srun has other names, which
are translated here, so that no other module depends on the launcher.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from drumline.base.errors import PreflightError, UsageError
from drumline.base.job_secret import secret_from
from drumline.base.rank_environment import NODE_START, RESTARTED

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The number of processes, as Open MPI and MPICH set it.
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
FIRST_REPORT_S = 1.0
# Of the rendezvous in a step of srun.
FIRST_PORT = 20_000
NUM_PORTS = 20_000


@dataclass(frozen=True)
class Topology:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    is_restart: bool = False
    """Whether the ranks of this node were restarted."""
    agent_hosts_store: bool = False
    """torchrun's agent runs the store; otherwise rank 0 does."""
    node_names: tuple[str, ...] = ()
    """The hosts in the order of their ranks, if the launcher sets them and all have the same number
    of ranks."""
    node_start: str = ""
    """Tells this start of the node's ranks from any other, if the launcher sets it."""
    secret: str | None = field(default=None, repr=False)
    """The secret that all ranks were given, or None (`base/job_secret.py`)."""

    @property
    def host(self) -> str:
        return socket.gethostname()


def own_variables() -> dict[str, str]:
    """A copy of this process's environment, for programs that are started with `python -m`."""
    return dict(os.environ)


def topology_from(environment: Mapping[str, str]) -> Topology | None:
    """This process's rank and job, or None when no launcher started it."""
    variables = dict(environment)
    if "SLURM_PROCID" in environment:
        variables = {**rank_variables(environment), **environment}
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        _check_not_mpi(variables)
        return None
    if missing := [name for name in NEEDED if name not in variables]:
        present = ", ".join(f"{name}={variables[name]}" for name in NEEDED if name in variables)
        raise PreflightError(
            f"the launcher set {present} but not {', '.join(missing)}",
            next_step="start with torchrun or `drumline train --procs N`, or set all of "
            + ", ".join(NEEDED),
        )
    rank = _integer(variables, "RANK")
    world_size = _integer(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise PreflightError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks are 0 to {world_size - 1}"
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK"),
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", default=world_size),
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        is_restart=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        or variables.get(RESTARTED) == "1",
        agent_hosts_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        secret=secret_from(variables),
        node_start=variables.get(NODE_START, ""),
        node_names=tuple(filter(None, variables.get("DRUMLINE_NODE_NAMES", "").split(","))),
    )


def let_first_rank_report(topology: Topology | None) -> None:
    """Wait, on a rank that fails before the rendezvous: all ranks of a host have the same command,
    and most likely fail for the same reason. The first reports it and exits, and the launcher ends
    the others; otherwise they report it."""
    if topology is not None and topology.local_rank > 0:
        time.sleep(FIRST_REPORT_S)


def _check_not_mpi(variables: Mapping[str, str]) -> None:
    """mpirun uses other names, so each process would believe that it is the only one."""
    for name in OF_MPI:
        if variables.get(name, "1") != "1":
            raise PreflightError(
                f"mpirun has started several processes ({name}={variables[name]}), but none knows its rank",
                next_step=f"in each, set {', '.join(NEEDED)} (Open MPI's RANK is $OMPI_COMM_WORLD_RANK); or start "
                "them with drumline launch --hosts",
            )


def _integer(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in variables:
        return default
    try:
        return int(variables[name])
    except ValueError:
        raise UsageError(f"{name} is {variables[name]!r}, which is not a whole number") from None


# A step of srun


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK and the other variables for a task of an srun step; empty elsewhere (a batch script is
    not an srun step)."""
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    if not is_step or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    node_list = environment["SLURM_STEP_NODELIST"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # Hosts are in the order of their ranks only if each has the same number of ranks, in blocks.
    distribution = environment.get("SLURM_DISTRIBUTION", "block")
    in_blocks = "," not in per_node and distribution.startswith("block")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        # `4(x2),3` means four tasks on each of two nodes and three on one more.
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", per_node, maxsplit=1)[0],
        "MASTER_ADDR": first_host(node_list),
        "MASTER_PORT": str(rendezvous_port(environment)),
        "DRUMLINE_NODE_NAMES": ",".join(node_names(node_list)) if in_blocks else "",
    }


def rendezvous_port(environment: Mapping[str, str]) -> int:
    job = int(environment.get("SLURM_JOB_ID", "0"))
    step = int(environment.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * 7 + step) % NUM_PORTS


def first_host(node_list: str) -> str:
    """The first name of Slurm's shorthand: `gpu[007-009,12],login` begins with `gpu007`."""
    return node_names(node_list)[0]


def node_names(node_list: str) -> list[str]:
    """`gpu[007-009,12],login` is gpu007, gpu008, gpu009, gpu12 and login."""
    names: list[str] = []
    # A comma inside brackets separates numbers, one outside names.
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\](.*)", word)
        if match is None:
            names.append(word)
            continue
        prefix, numbers, suffix = match.groups()
        suffixes = node_names(suffix) or [""]
        for number in _padded_numbers(numbers):
            names += [f"{prefix}{number}{expanded}" for expanded in suffixes]
    return names


def _padded_numbers(numbers: str) -> Iterator[str]:
    """`007-009,12` is 007, 008, 009 and 12."""
    for interval in filter(None, numbers.split(",")):
        first, _, last = interval.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
