"""DL109: several nodes are told to meet at localhost."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.lint.finding import Finding, Severity
from drumline.lint.reading.launches import PYTHON, Launch, launches
from drumline.lint.reading.meeting import LOCAL, backend, endpoint, flag_value, has_several_nodes, host_in
from drumline.lint.reading.shell import Script
from drumline.lint.rule import Rule

RULE = Rule(
    id="DL109",
    name="local-meeting-place",
    severity=Severity.ERROR,
    summary="several nodes are to meet at localhost",
    why=(
        "localhost is another machine on every node. Each waits at itself for the others, until it gives up; with "
        "c10d, a node may even take itself for all of the job."
    ),
    fix="give the address of the first node, as all of them know it",
    bad="torchrun --nnodes=2 --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=localhost:29500 train.py\n",
    good="torchrun --nnodes=2 --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=node-a:29500 train.py\n",
    language="shell",
)


def check_shell(script: Script) -> Iterator[Finding]:
    """Of torchrun's flags, and of MASTER_ADDR where ranks read it themselves."""
    for launch in launches(script):
        if launch.is_torchrun and has_several_nodes(script, launch) is True:
            yield from _of_flags(script, launch)
    yield from _of_variable(script)


def _of_flags(script: Script, launch: Launch) -> Iterator[Finding]:
    meeting, address = endpoint(launch), launch.flags.get("master-addr")
    nodes = flag_value(script, launch, "nnodes")
    if meeting is not None:
        host = host_in(script, meeting.value) if meeting.value else None
        if host in LOCAL:
            yield RULE.at(
                script, meeting.word, f"{nodes} nodes are to meet at {host}, which is another on each"
            )
    elif backend(script, launch) == "static" and address is not None:
        host = flag_value(script, launch, "master-addr")
        if host in LOCAL:
            yield RULE.at(
                script, address.word, f"{nodes} nodes are to meet at {host}, which is another on each"
            )
    elif backend(script, launch) == "static" and launch.is_sure:
        yield RULE.at(
            script,
            launch.flags["nnodes"].word,
            f"{nodes} nodes and no address: torchrun takes 127.0.0.1, which is another on each",
            fix="add --master-addr with the address of the first node",
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
