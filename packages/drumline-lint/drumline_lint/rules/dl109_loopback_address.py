"""DL109: several nodes rendezvous at localhost."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import ACCELERATE, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import (
    LOOPBACK,
    address_flag,
    backend,
    host_of,
    least_nodes,
    nodes_flag,
)
from drumline_lint.reading.shell import Script

RULE = rule("DL109")
_BRINGS_ADDRESS = {"config-file", "deepspeed-hostfile", "mpirun-hostfile", "rdzv-conf"}


def check_shell(script: Script) -> Iterator[Finding]:
    findings = {
        launch: [*_of_flags(script, launch), *_of_variable(script, launch)]
        for launch in launches(script)
    }
    reported = [launch for launch in findings if findings[launch]]
    # Two launches in one script are nodes that are played on one machine.
    if len(reported) == 1 and not _is_simulated(reported[0]):
        yield from findings[reported[0]]


def _is_simulated(launch: Launch) -> bool:
    """Whether the nodes are processes, or containers, of one machine."""
    container = launch.script.container
    shares_network = container is not None and container.is_on_shared_network
    return shares_network or (launch.command.is_background and launch.srun is None)


def _of_flags(script: Script, launch: Launch) -> Iterator[Finding]:
    nodes = least_nodes(launch)
    if nodes is None and launch.srun is not None:
        nodes = started_on_nodes(launch)
    if launch.kind == PYTHON or nodes is None or nodes < 2 or "standalone" in launch.flags:
        return
    flag = address_flag(launch)
    host = host_of(launch, flag.value) if flag and flag.value else None
    if flag is not None and host in LOOPBACK:
        message = (
            f"{nodes} nodes rendezvous at {host}, which is a different machine on each of them"
        )
        yield RULE.at(script, flag.word, message)
    elif flag is None and launch.is_torchrun and _takes_loopback(launch):
        yield _without_address(script, launch, nodes)
    elif flag is None and _gets_no_address(launch):
        message = f"{nodes} machines and no --main_process_ip: they do not find the first one"
        place = launch.flags[nodes_flag(launch)].word
        fix = "add --main_process_ip with the address of the first machine"
        yield RULE.at(script, place, message, fix=fix, severity=Severity.WARNING)


def _gets_no_address(launch: Launch) -> bool:
    """What is left out may be in a configuration file of accelerate."""
    is_read = launch.kind == ACCELERATE and launch.is_sure and nodes_flag(launch) in launch.flags
    return is_read and not _BRINGS_ADDRESS & launch.flags.keys()


def _takes_loopback(launch: Launch) -> bool:
    container = launch.script.container
    is_set_by_operator = container is not None and container.sets_torchrun_flags
    return launch.is_sure and backend(launch) in {"static", "c10d"} and not is_set_by_operator


def _without_address(script: Script, launch: Launch, nodes: int) -> Finding:
    is_static = backend(launch) == "static"
    name = "master-addr" if is_static else "rdzv-endpoint"
    default = "127.0.0.1" if is_static else "localhost"
    unread = (
        "; c10d does not read --master-addr"
        if "master-addr" in launch.flags and not is_static
        else ""
    )
    message = f"{nodes} nodes and no --{name}: each takes {default}, which is itself{unread}"
    fix = f"add --{name} with the address of the first node"
    return RULE.at(script, launch.flags[nodes_flag(launch)].word, message, fix=fix)


def _ranks_of_containers(launch: Launch) -> int:
    """The world size, where a container is one rank."""
    size = variable(launch, "WORLD_SIZE")
    if launch.script.container is None or size is None or variable(launch, "RANK") is None:
        return 1
    value = size.script.constant(size.assignment.value) or ""
    return int(value) if value.isascii() and value.isdigit() else 1


def _of_variable(script: Script, launch: Launch) -> Iterator[Finding]:
    """torchrun sets MASTER_ADDR and does not read it; Python reads it."""
    nodes = max(started_on_nodes(launch) or 1, _ranks_of_containers(launch))
    address = variable(launch, "MASTER_ADDR")
    if launch.kind != PYTHON or nodes < 2 or address is None:
        return
    host = address.script.constant(address.assignment.value)
    if host in LOOPBACK:
        message = (
            f"{nodes} nodes rendezvous at {host}, which is a different machine on each of them"
        )
        yield RULE.at(script, address.assignment, message)
