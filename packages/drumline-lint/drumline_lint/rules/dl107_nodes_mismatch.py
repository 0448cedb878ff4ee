"""DL107: a launcher waits for other nodes than those that it is started on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes, tasks_per_node, uses_task_variable
from drumline_lint.reading.launchers import DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes, most_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL107")
# What starts the script, or a part of it, on the other nodes.
_DISTRIBUTES = re.compile(
    r"^[^#\n]*\b(?:srun|ssh|mpirun|mpiexec|pdsh|clush|parallel|ray|dask|horovodrun|ibrun|jsrun|flux|hostfile)\b",
    re.MULTILINE,
)
# `$(srun -n1 hostname -i)` asks a node for its address.
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)")
_COUNTED = {"StatefulSet", "Job", "Deployment", "PyTorchJob"}
# The pods of other kinds may be independent runs.
_ONE_JOB = {"PyTorchJob", "StatefulSet"}


def check_shell(script: Script) -> Iterator[Finding]:
    yield from _only_first_node(script)
    for launch in launches(script):
        yield from _standalone(script, launch)
        expected = least_nodes(launch)
        started = started_on_nodes(launch)
        container = launch.script.container
        is_counted = launch.srun is not None or (container and container.kind in _COUNTED)
        # Of several tasks on a node, DL103 reports.
        if not expected or not started or not is_counted or (tasks_per_node(launch) or 1) > 1:
            continue
        by = "srun" if launch.srun is not None else "the manifest"
        is_fewer = started < expected
        if expected > 1 and (is_fewer or started > (most_nodes(launch) or started)):
            message = f"{launch.kind} waits for {expected} nodes, but {by} starts it on {started}"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)
        elif started > 1 and _is_alone(launch):
            how = "--standalone" if "standalone" in launch.flags else "without --nnodes"
            message = f"torchrun {how} runs on {started} nodes: each of them trains alone"
            yield RULE.at(script, launch.name[-1], message, fix=_JOIN)


_JOIN = "join the nodes: --nnodes, --rdzv-id, --rdzv-backend=c10d and --rdzv-endpoint"


def _standalone(script: Script, launch: Launch) -> Iterator[Finding]:
    nodes = least_nodes(launch) or 1
    if launch.is_torchrun and "standalone" in launch.flags and nodes > 1:
        message = f"--standalone is a job of one node, but torchrun waits for {nodes}"
        yield RULE.at(script, launch.flags["standalone"].word, message, fix=_JOIN)


def _is_alone(launch: Launch) -> bool:
    """Tasks with different arguments are independent runs on purpose."""
    container = launch.script.container
    is_one_job = container is None or container.kind in _ONE_JOB
    is_on_one = "standalone" in launch.flags or most_nodes(launch) == 1
    return launch.is_torchrun and is_one_job and is_on_one and not uses_task_variable(launch)


def _only_first_node(script: Script) -> Iterator[Finding]:
    """Slurm runs a batch script on the first of its nodes."""
    nodes = script.sbatch.number("nodes") or 1
    if nodes < 2 or _DISTRIBUTES.search(_SUBSTITUTION.sub("", script.text)):
        return
    for launch in launches(script):
        if launch.kind != PYTHON and not launch.command.is_conditional:
            rest = "node" if nodes == 2 else f"{nodes - 1} nodes"
            message = (
                f"Slurm runs a batch script on its first node only: {launch.kind} is not started on the other "
                f"{rest}"
            )
            fix = f"start it with srun: srun {launch.kind} ..."
            fix = "add --hostfile" if launch.kind == DEEPSPEED else fix
            yield RULE.at(script, launch.name[-1], message, fix=fix)
