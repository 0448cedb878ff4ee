"""Where this process stands among the ranks, as its launcher told it. The only reader of launchers' variables.

torchrun sets RANK and its kin; so do most other launchers. Slurm's srun sets names of its own, which are
translated here, so that nothing further on needs to know who started it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.errors import PreflightError, UsageError
from drumline.launch.cluster.slurm import rank_variables
from drumline.net.secrets import secret_from

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How many processes there are, as Open MPI and MPICH say it.
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Set by Drumline's own agent.
RESTARTED = "DRUMLINE_RESTARTED"
FIRST_WORD_S = 1.0


@dataclass(frozen=True)
class Topology:
    """One rank's place in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    is_restart: bool = False
    """Whether the agent of this node has started its ranks before."""
    agent_hosts_store: bool = False
    """torchrun's agent runs the store; otherwise rank 0 does."""
    node_names: tuple[str, ...] = ()
    """The hosts in the order of their ranks, where the launcher tells them and all have as many ranks as this one."""
    secret: str | None = field(default=None, repr=False)
    """What all ranks were given; None: nothing (`key_exchange.py`)."""

    @property
    def host(self) -> str:
        return socket.gethostname()


def topology_from(environment: Mapping[str, str]) -> Topology | None:
    """This process's place, or None when no launcher started it."""
    variables = {**rank_variables(environment), **environment}
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        _check_is_alone(variables)
        return None
    if missing := [name for name in NEEDED if name not in variables]:
        raise PreflightError(
            f"the launcher set {_given(variables)} but not {', '.join(missing)}",
            next_step="start with torchrun or `drumline train --procs N`, or set all of " + ", ".join(NEEDED),
        )
    world_size = _integer(variables, "WORLD_SIZE")
    restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    topology = Topology(
        rank=_integer(variables, "RANK"),
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK"),
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE")
        if "LOCAL_WORLD_SIZE" in variables
        else world_size,
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        is_restart=restarts != "0" or variables.get(RESTARTED) == "1",
        agent_hosts_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        secret=secret_from(variables),
        node_names=tuple(filter(None, variables.get("DRUMLINE_NODE_NAMES", "").split(","))),
    )
    if not 0 <= topology.rank < topology.world_size:
        raise PreflightError(
            f"RANK is {topology.rank}, but WORLD_SIZE is {topology.world_size}: ranks go from 0 up"
        )
    return topology


def let_first_rank_speak(topology: Topology | None) -> None:
    """Before ranks have met: all of a host were given the same command, and most likely fail for the same reason. When
    the first has told it and ends, the launcher ends the others; should it have nothing to tell, they do."""
    if topology is not None and topology.local_rank > 0:
        time.sleep(FIRST_WORD_S)


def _check_is_alone(variables: Mapping[str, str]) -> None:
    """mpirun counts its processes by names of its own, and each would take itself for the only one."""
    for name in OF_MPI:
        if variables.get(name, "1") != "1":
            raise PreflightError(
                f"mpirun has started several processes ({name}={variables[name]}), but none knows its rank",
                next_step=f"in each, set {', '.join(NEEDED)} (Open MPI's RANK is $OMPI_COMM_WORLD_RANK); or start "
                "them with drumline launch --hosts",
            )


def _given(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in NEEDED if name in variables)


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise UsageError(f"{name} is {variables[name]!r}, which is not a whole number") from None
