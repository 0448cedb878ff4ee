"""DL108: several nodes have the same node rank."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import ACCELERATE, Flag, Launch, launches
from drumline_lint.reading.rendezvous import (
    address_flag,
    backend,
    least_nodes,
    nodes_flag,
    set_by_container,
)
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import whole_number

RULE = rule("DL108")


def check_shell(script: Script) -> Iterator[Finding]:
    """Launchers of several nodes, all with one node rank, or with none.

    With c10d and etcd the rendezvous gives each node its rank.

        #SBATCH --nodes=2
        srun torchrun --nnodes=2 --node-rank=0 --master-addr=$HOST train.py
    """
    for launch in launches(script):
        nodes = least_nodes(launch)
        if nodes == 1 or backend(launch) not in {"static", ""} or launch.is_of_operator:
            continue

        yield from _of_config(launch)

        name = "machine-rank" if launch.kind == ACCELERATE else "node-rank"
        flag = launch.flags.get(name)
        if flag is not None:
            yield from _of_flag(script, launch, flag)
            continue

        # Without an address, DL109 reports.
        is_sure = launch.is_torchrun and launch.is_sure and not launch.command.is_conditional
        if nodes and is_sure and address_flag(launch) is not None:
            message = f"{nodes} nodes and no --{name}: every node is node 0"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)


def _of_flag(script: Script, launch: Launch, flag: Flag) -> Iterator[Finding]:
    """`--node-rank=0` of a command that runs on several nodes, or that another service has, too."""
    rank = launch.value(flag.name) or ""
    if not rank.isdigit():
        return

    if how := _how_repeated(launch):
        message = f"{how}, so each node has --{flag.name} {rank}"
    elif service := _service_before(launch, rank):
        message = f"the service {service} has --{flag.name} {rank}, too"
    else:
        return

    place = (flag.value and set_by_container(launch, flag.value)) or flag.word
    yield RULE.at(script, place, message)


def _service_before(launch: Launch, rank: str) -> str:
    """The service of a Compose file that has the same rank, in the same job.

    For example:

        first:
          command: torchrun --nnodes=2 --node-rank=0 --master-addr=first train.py
        second:
          command: torchrun --nnodes=2 --node-rank=0 --master-addr=first train.py
    """
    container = launch.script.container
    address = _address(launch)
    if container is None or not address:
        return ""

    for service in container.services:
        name = service.container.name if service.container is not None else None
        if name is None or name is container.name:
            return ""

        for peer in launches(service):
            if peer.value("node-rank") == rank and _address(peer) == address:
                return name.text
    return ""


def _address(launch: Launch) -> str:
    """The address of the first of several nodes; empty if none is written."""
    flag = address_flag(launch)
    nodes = least_nodes(launch) or 1
    return launch.value(flag.name) or "" if flag is not None and nodes > 1 else ""


def _of_config(launch: Launch) -> Iterator[Finding]:
    """A machine_rank in the file of accelerate's --config_file, which no flag replaces.

    For example:

        num_machines: 2
        machine_rank: 0
    """
    rank = launch.configured("machine-rank")
    machines = launch.configured("num-machines")
    if rank is None or machines is None or launch.config is None:
        return

    by_rendezvous = launch.configured("rdzv-backend")
    is_static = by_rendezvous is None or by_rendezvous.text == "static"
    how = _how_repeated(launch)
    if how and is_static and (whole_number(machines.text) or 1) > 1:
        message = f"{how}, so each node has machine_rank {rank.text}"
        yield RULE.at(launch.config, rank, message, fix="add --machine_rank to the command")


def _how_repeated(launch: Launch) -> str:
    """How one command gets to several nodes; empty if it does not."""
    command = launch.command
    if command.words[0].plain == "pdsh":
        return "the same command runs on every host"

    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    if command.loop and (launch.is_elsewhere or is_step):
        return "each turn of the loop starts the same command"

    return "the same command runs on every node" if (started_on_nodes(launch) or 1) > 1 else ""
