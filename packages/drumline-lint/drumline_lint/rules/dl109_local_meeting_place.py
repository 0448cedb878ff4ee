"""DL109: several nodes are told to meet at localhost."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.reading.launches import PYTHON, Launch, launches
from drumline_lint.reading.meeting import LOCAL, backend, endpoint, flag_value, has_several_nodes, host_in
from drumline_lint.reading.shell import Script
from drumline_lint.rule import Rule

RULE = Rule(
    id="DL109",
    name="local-meeting-place",
    severity=Severity.ERROR,
    summary="several nodes are to meet at localhost",
    why=(
        "localhost is another machine on every node. Each waits at itself for the others, until it gives up; with c10d "
        "and a range such as --nnodes=1:2, each trains alone."
    ),
    fix="give the address of the first node, as all of them know it",
    bad="torchrun --nnodes=2 --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=localhost:29500 train.py\n",
    good="torchrun --nnodes=2 --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=node-a:29500 train.py\n",
    language="shell",
)


def check_shell(script: Script) -> Iterator[Finding]:
    """Of torchrun's flags, and of MASTER_ADDR where ranks read it themselves."""
    found = [
        finding
        for launch in launches(script)
        if launch.is_torchrun and _needs_others(script, launch)
        for finding in _of_flags(script, launch)
    ]
    # Two of them in one script are nodes that are played on one machine.
    yield from found if len(found) == 1 else []
    yield from _of_variable(script)


def _needs_others(script: Script, launch: Launch) -> bool:
    """Whether it does not go on with one node alone."""
    least = (flag_value(script, launch, "nnodes") or "").partition(":")[0]
    return has_several_nodes(script, launch) is True and least != "1"


def _of_flags(script: Script, launch: Launch) -> Iterator[Finding]:
    how = backend(script, launch)
    name = "rdzv-endpoint" if endpoint(launch) or how != "static" else "master-addr"
    flag, nodes = launch.flags.get(name), flag_value(script, launch, "nnodes")
    if flag is not None:
        host = host_in(script, flag.value) if flag.value else None
        if host in LOCAL:
            yield RULE.at(script, flag.word, f"{nodes} nodes are to meet at {host}, which is another on each")
    elif launch.is_sure and how in {"static", "c10d"}:
        taken = "127.0.0.1" if how == "static" else "localhost"
        unread = (
            ", and c10d does not read --master-addr"
            if "master-addr" in launch.flags and how == "c10d"
            else ""
        )
        yield RULE.at(
            script,
            launch.flags["nnodes"].word,
            f"{nodes} nodes and no --{name}: torchrun takes {taken}, which is another on each{unread}",
            fix=f"add --{name} with the address of the first node",
        )


def _of_variable(script: Script) -> Iterator[Finding]:
    """torchrun sets MASTER_ADDR and does not read it."""
    nodes = script.sbatch.number("nodes") or 1
    if nodes < 2 or not any(one.kind == PYTHON and one.srun is not None for one in launches(script)):
        return
    for assignment in script.assignments:
        if assignment.name != "MASTER_ADDR" or assignment.command.is_conditional:
            continue
        value = script.constant(assignment.value)
        if value in LOCAL and (assignment.is_exported or assignment.name in script.exported):
            yield RULE.at(
                script, assignment, f"{nodes} nodes are to meet at {value}, which is another on each"
            )
