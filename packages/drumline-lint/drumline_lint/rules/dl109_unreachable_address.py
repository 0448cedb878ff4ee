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
    """Nodes that are given an address of themselves, a list of nodes, or a name nobody has.

    For example:

        #SBATCH --nodes=2
        srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:29500 train.py
    """
    started = launches(script)
    if not started:
        yield from _of_batch_script(script)

    findings = {launch: [*_of_launch(script, launch)] for launch in started}
    reported = [launch for launch in findings if findings[launch]]
    # Two launches in one script are nodes that are played on one machine.
    if len(reported) == 1 or script.container is not None:
        for launch in reported:
            if not _is_simulated(launch):
                yield from findings[launch]


def _of_batch_script(script: Script) -> Iterator[Finding]:
    """Where what the nodes run is not seen, the address that they all get.

    For example:

        export MASTER_ADDR=localhost
        srun ./train.sh
    """
    nodes = script.sbatch.number("nodes") or 1
    starts_steps = any(command.words[0].plain == "srun" for command in script.commands)
    if nodes < 2 or not starts_steps:
        return

    for address in script.variables.get("MASTER_ADDR", []):
        if address.is_seen and not address.is_conditional and address.constant in LOOPBACK:
            yield RULE.at(script, address, _at_loopback(nodes, address.constant))


def _at_loopback(nodes: int, host: str) -> str:
    return f"{nodes} nodes rendezvous at {host}, which is a different machine on each of them"


def _of_launch(script: Script, launch: Launch) -> Iterator[Finding]:
    """The address that a launcher is given for the first node, or that it has none.

    For example:

        --rdzv-endpoint=localhost:29500
        --rdzv-endpoint=$SLURM_JOB_NODELIST
        --rdzv-endpoint=nobody:29500
    """
    nodes = _nodes(launch)
    address = first_node(launch)
    if address is None:
        if nodes > 1 and launch.is_torchrun and not launch.is_of_operator and launch.is_sure:
            yield from _without_address(script, launch, nodes)
        return

    place, word = address
    place = set_by_container(launch, word) or place
    host = host_in(launch, word)
    if nodes > 1 and host in LOOPBACK:
        yield RULE.at(script, place, _at_loopback(nodes, host))
        return
    if nodes > 1 and _NODE_LIST.fullmatch(host):
        message = f"{host} is a list of nodes such as gpu[07-10], or a host on which no rank runs"
        fix = 'take the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield RULE.at(script, place, message, fix=fix)
        return

    container = launch.script.container
    if container is None or host in LOOPBACK or "$" in host or _NUMBERS.fullmatch(host):
        return
    if container.hosts and "." not in host and host not in container.hosts:
        message = f"no service of this file is called {host}"
        yield RULE.at(script, place, message, fix="write the name of a service")
    elif container.unresolved:
        message = f"{host} is not resolved: {container.unresolved}"
        yield RULE.at(script, place, message, fix="give the pods names that can be resolved")


def _without_address(script: Script, launch: Launch, nodes: int) -> Iterator[Finding]:
    """`torchrun --nnodes=2 train.py`"""
    if backend(launch) not in {"static", "c10d"}:
        return

    is_static = backend(launch) == "static"
    name = "master-addr" if is_static else "rdzv-endpoint"
    message = f"{nodes} nodes and no --{name}: each takes localhost, which is itself"
    if "master-addr" in launch.flags and not is_static:
        message += "; c10d does not read --master-addr"

    fix = f"add --{name} with the address of the first node"
    yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message, fix=fix)


def _nodes(launch: Launch) -> int:
    """How many nodes, or containers of one rank, work together.

    A container of one rank has them in its environment:

        RANK: 0
        WORLD_SIZE: 2
    """
    if launch.kind == PYTHON and launch.script.container is not None:
        size = variable(launch, "WORLD_SIZE")
        if size is not None and variable(launch, "RANK") is not None:
            return whole_number(size.constant) or 1

    nodes = least_nodes(launch) if launch.kind != PYTHON else None
    if nodes is None and (launch.srun is not None or launch.kind == PYTHON):
        nodes = started_on_nodes(launch)
    return 1 if nodes is None or "standalone" in launch.flags else nodes


def _is_simulated(launch: Launch) -> bool:
    """Whether the nodes are processes, or containers, of one machine.

    For example:

        torchrun --nnodes=2 --node-rank=0 --master-addr=localhost train.py &
    """
    container = launch.script.container
    if container is not None and container.is_on_shared_network:
        return True

    return launch.command.is_background and launch.srun is None
