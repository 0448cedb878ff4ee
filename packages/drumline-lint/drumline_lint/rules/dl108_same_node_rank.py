"""DL108: several nodes have the same node rank."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import ACCELERATE, Launch, launches
from drumline_lint.reading.rendezvous import address_flag, backend, least_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL108")


def check_shell(script: Script) -> Iterator[Finding]:
    yield from _of_replicas(script)
    for launch in launches(script):
        if not _needs_node_rank(launch):
            continue
        name = "machine_rank" if launch.kind == ACCELERATE else "node-rank"
        flag = launch.flags.get(name.replace("_", "-"))
        if flag is None and address_flag(launch) is None:
            continue  # DL109 reports that; with an endpoint, no node rank is needed.
        if flag is None:
            message = f"{least_nodes(launch)} nodes and no --{name}: every node is node 0"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)
        elif (started_on_nodes(launch) or 1) > 1 and (rank := launch.value(flag.name)) is not None:
            message = f"the same command runs on every node, so each has --{name} {rank}"
            yield RULE.at(script, flag.word, message)
        elif _rank_and_address(launch) in _of_siblings(script):
            message = f"another service of this job has --{name} {launch.value(flag.name)}, too"
            yield RULE.at(script, flag.word, message)


def _of_siblings(script: Script) -> list[tuple[str, str]]:
    ranks = [
        _rank_and_address(launch) for sibling in script.siblings for launch in launches(sibling)
    ]
    return [rank for rank in ranks if rank is not None]


def _rank_and_address(launch: Launch) -> tuple[str, str] | None:
    """Of services with one rendezvous address and port, each has another node rank."""
    rank = launch.value("node-rank")
    address = launch.value("master-addr")
    port = launch.value("master-port") or ""
    return None if rank is None or address is None else (rank, f"{address}:{port}")


def _of_replicas(script: Script) -> Iterator[Finding]:
    """All pods of a StatefulSet have the same variables."""
    container = script.container
    if container is None or container.kind != "StatefulSet" or (container.replicas or 1) < 2:
        return
    for assignment in script.environment:
        value = script.constant(assignment.value)
        if assignment.name in {"RANK", "NODE_RANK"} and value and value.isdigit():
            message = f"each of the {container.replicas} pods has {assignment.name}={value}"
            yield RULE.at(script, assignment, message)


def _needs_node_rank(launch: Launch) -> bool:
    """With c10d and etcd the rendezvous gives each node its rank."""
    if (least_nodes(launch) or 1) < 2 or not launch.is_sure or launch.command.is_conditional:
        return False
    if backend(launch) != "static":
        return False
    if launch.kind == ACCELERATE:
        # Elsewhere each machine may have its own configuration file.
        return (started_on_nodes(launch) or 1) > 1 and "config-file" not in launch.flags
    container = launch.script.container
    is_set_by_operator = container is not None and container.sets_torchrun_flags
    return launch.is_torchrun and not is_set_by_operator
