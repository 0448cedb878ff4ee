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
        # Without an address, DL109 reports.
        is_sure = launch.is_torchrun and launch.is_sure and not launch.command.is_conditional
        if flag is None and nodes and is_sure and address_flag(launch) is not None:
            message = f"{nodes} nodes and no --{name}: every node is node 0"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)


def _how_repeated(launch: Launch) -> str:
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    is_remote = launch.is_elsewhere or is_step
    if launch.command.words[0].plain == "pdsh":
        return "the same command runs on every host"
    if launch.command.loop and is_remote:
        return "each turn of the loop starts the same command"
    return "the same command runs on every node" if (started_on_nodes(launch) or 1) > 1 else ""
