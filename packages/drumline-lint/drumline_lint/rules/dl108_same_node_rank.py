"""DL108: several nodes have the same node rank."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import ACCELERATE, Launch, launches
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
    """With c10d and etcd the rendezvous gives each node its rank."""
    for launch in launches(script):
        name = "machine-rank" if launch.kind == ACCELERATE else "node-rank"
        flag = launch.flags.get(name)
        rank = launch.value(name) or ""
        nodes = least_nodes(launch)
        if nodes == 1 or backend(launch) not in {"static", ""} or launch.is_of_operator:
            continue
        if flag is not None and rank.isdigit() and (how := _how_repeated(launch)):
            place = (flag.value and set_by_container(launch, flag.value)) or flag.word
            yield RULE.at(script, place, f"{how}, so each node has --{name} {rank}")
        elif flag is not None and rank.isdigit() and (service := _service_before(launch, rank)):
            place = (flag.value and set_by_container(launch, flag.value)) or flag.word
            message = f"the service {service} has --{name} {rank}, too"
            yield RULE.at(script, place, message)
        yield from _of_config(launch)
        # Without an address, DL109 reports.
        is_sure = launch.is_torchrun and launch.is_sure and not launch.command.is_conditional
        if flag is None and nodes and is_sure and address_flag(launch) is not None:
            message = f"{nodes} nodes and no --{name}: every node is node 0"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)


def _service_before(launch: Launch, rank: str) -> str:
    """The service of a Compose file that has the same rank, in the same job."""
    container = launch.script.container
    address = _address(launch)
    services = container.services if container is not None and address else []
    for service in services:
        name = service.container.name if service.container is not None else None
        if name is None or container is None or name is container.name:
            return ""
        if any(
            peer.value("node-rank") == rank and _address(peer) == address
            for peer in launches(service)
        ):
            return name.text
    return ""


def _address(launch: Launch) -> str:
    flag = address_flag(launch)
    nodes = least_nodes(launch) or 1
    return launch.value(flag.name) or "" if flag is not None and nodes > 1 else ""


def _of_config(launch: Launch) -> Iterator[Finding]:
    """A machine_rank in the file of accelerate's --config_file, which no flag replaces."""
    rank = launch.configured("machine-rank")
    machines = launch.configured("num-machines")
    several = machines is not None and (whole_number(machines.text) or 1) > 1
    by_rendezvous = launch.configured("rdzv-backend")
    is_static = by_rendezvous is None or by_rendezvous.text == "static"
    if rank is None or not several or not is_static or launch.config is None:
        return
    if how := _how_repeated(launch):
        message = f"{how}, so each node has machine_rank {rank.text}"
        yield RULE.at(launch.config, rank, message, fix="add --machine_rank to the command")


def _how_repeated(launch: Launch) -> str:
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    is_remote = launch.is_elsewhere or is_step
    if launch.command.words[0].plain == "pdsh":
        return "the same command runs on every host"
    if launch.command.loop and is_remote:
        return "each turn of the loop starts the same command"
    return "the same command runs on every node" if (started_on_nodes(launch) or 1) > 1 else ""
