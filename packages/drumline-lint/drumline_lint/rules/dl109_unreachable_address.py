"""DL109: the address of the first node is none by which the other nodes reach it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import (
    LOOPBACK,
    backend,
    first_node,
    host_in,
    least_nodes,
    nodes_flag,
    set_by_container,
    variable,
)
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import whole_number

RULE = rule("DL109")
# The list itself, all its hosts, or the first name of `node[07-10]` cut at a comma.
_NODE_LIST = re.compile(
    r"\$\{?SLURM_(?:\w*NODELIST|SUBMIT_HOST)(?:%%,\*)?\}?|\$\(\s*scontrol show hostnames?\b[^|]*\)"
    r"|\$\(\s*echo \"?\$\{?SLURM_\w*NODELIST\}?\"?\s*\|\s*(?:cut|awk)\b[^|]*,[^|]*\)"
)
_NUMBERS = re.compile(r"[0-9.]+|\[?[0-9a-fA-F]*:[0-9a-fA-F:]*\]?")


def check_shell(script: Script) -> Iterator[Finding]:
    if not launches(script):
        yield from _of_batch_script(script)
    findings = {launch: [*_of_launch(script, launch)] for launch in launches(script)}
    reported = [launch for launch in findings if findings[launch]]
    # Two launches in one script are nodes that are played on one machine.
    for launch in reported if len(reported) == 1 or script.container is not None else ():
        if not _is_simulated(launch):
            yield from findings[launch]


def _of_batch_script(script: Script) -> Iterator[Finding]:
    """Where what the nodes run is not seen, the address that they all get."""
    nodes = script.sbatch.number("nodes") or 1
    starts_steps = any(command.words[0].plain == "srun" for command in script.commands)
    for address in script.variables.get("MASTER_ADDR", []) if nodes > 1 and starts_steps else ():
        if address.is_seen and not address.is_conditional and address.constant in LOOPBACK:
            yield RULE.at(script, address, _at_loopback(nodes, address.constant))


def _at_loopback(nodes: int, host: str) -> str:
    return f"{nodes} nodes rendezvous at {host}, which is a different machine on each of them"


def _of_launch(script: Script, launch: Launch) -> Iterator[Finding]:
    nodes = _nodes(launch)
    address = first_node(launch)
    if address is None:
        if nodes > 1 and launch.is_torchrun and not launch.is_of_operator and launch.is_sure:
            yield from _without_address(script, launch, nodes)
        return
    place, word = address
    place = set_by_container(launch, word) or place
    host = host_in(launch, word)
    container = launch.script.container
    if nodes > 1 and host in LOOPBACK:
        yield RULE.at(script, place, _at_loopback(nodes, host))
    elif nodes > 1 and _NODE_LIST.fullmatch(host):
        message = f"{host} is a list of nodes such as gpu[07-10], or a host on which no rank runs"
        fix = 'take the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield RULE.at(script, place, message, fix=fix)
    elif container is None or host in LOOPBACK or "$" in host or _NUMBERS.fullmatch(host):
        return
    elif container.hosts and "." not in host and host not in container.hosts:
        message = f"no service of this file is called {host}"
        yield RULE.at(script, place, message, fix="write the name of a service")
    elif container.unresolved:
        message = f"{host} is not resolved: {container.unresolved}"
        yield RULE.at(script, place, message, fix="give the pods names that can be resolved")


def _nodes(launch: Launch) -> int:
    """How many nodes, or containers of one rank, work together."""
    nodes = least_nodes(launch) if launch.kind != PYTHON else None
    if nodes is None and (launch.srun is not None or launch.kind == PYTHON):
        nodes = started_on_nodes(launch)
    size = variable(launch, "WORLD_SIZE")
    is_rank = launch.kind == PYTHON and variable(launch, "RANK") is not None
    if launch.script.container is not None and is_rank and size is not None:
        return whole_number(size.constant) or 1
    return 1 if nodes is None or "standalone" in launch.flags else nodes


def _is_simulated(launch: Launch) -> bool:
    """Whether the nodes are processes, or containers, of one machine."""
    container = launch.script.container
    shares_network = container is not None and container.is_on_shared_network
    return shares_network or (launch.command.is_background and launch.srun is None)


def _without_address(script: Script, launch: Launch, nodes: int) -> Iterator[Finding]:
    is_static = backend(launch) == "static"
    is_unread = "master-addr" in launch.flags and not is_static
    if backend(launch) in {"static", "c10d"}:
        name = "master-addr" if is_static else "rdzv-endpoint"
        message = f"{nodes} nodes and no --{name}: each takes localhost, which is itself"
        message += "; c10d does not read --master-addr" if is_unread else ""
        fix = f"add --{name} with the address of the first node"
        yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message, fix=fix)
