"""DL107: a launcher waits for other nodes than those that it is started on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import started_on_nodes, tasks_per_node, uses_task_variable
from drumline_lint.reading.launchers import DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes, most_nodes, nodes_flag, variable
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import whole_number
from drumline_lint.reading.source import Source

RULE = rule("DL107", only_distributed=False)

# What starts the script, or a part of it, on the other nodes.
_DISTRIBUTES = re.compile(
    r"^[^#\n]*\b(?:srun|ssh|mpirun|mpiexec|pdsh|clush|parallel|ray|dask|horovodrun|ibrun|jsrun|flux|hostfile)\b",
    re.MULTILINE,
)
# These prepare nodes or clean them up, also as `bash -c 'mkdir -p /tmp/data && tar xf data.tar'`.
_PREPARES = r"(?:rsync|rm|mkdir|cp|hostname|nvidia-smi|tar|unzip|ls|echo|touch|sync)\b"
_PREPARES_IN_QUOTES = rf"{_PREPARES}[^\n;&|'\"]*"
_HELPERS = re.compile(
    rf"^[ \t]*srun(?:[ \t]+--?[\w-]+(?:=\S+|[ \t]+\d+)?)*[ \t]+(?:{_PREPARES}[^\n]*"
    rf"|(?:ba)?sh[ \t]+-l?c[ \t]+(?P<quote>['\"])\s*{_PREPARES_IN_QUOTES}"
    rf"(?:(?:;|&&|\n)\s*{_PREPARES_IN_QUOTES})*;?\s*(?P=quote))",
    re.MULTILINE,
)
# `$(srun -n1 hostname -i)` asks a node for its address.
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)")
_COUNTED = {"StatefulSet", "Job", "Deployment", "PyTorchJob"}
# The pods of other kinds may be independent runs.
_ONE_JOB = {"PyTorchJob", "StatefulSet"}
_JOIN = "join the nodes: --nnodes, --rdzv-id, --rdzv-backend=c10d and --rdzv-endpoint"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A Trainer of Lightning, whose devices are the tasks of the job on each node.

    For `srun --ntasks-per-node=1 python train.py`:

        trainer = Trainer(devices=4, num_nodes=2)
    """
    for call in program.calls(source, "pytorch_lightning.Trainer"):
        option = argument(call, None, "devices")
        values = program.values(option)
        counts = [value.value for value in values if isinstance(value, ConstantValue)]
        devices = counts[0] if len(counts) == 1 else None
        if not isinstance(devices, int) or devices < 2:
            continue

        for launch in program.launches_of(source):
            tasks = tasks_per_node(launch) if launch.srun is not None else None
            if launch.kind == PYTHON and tasks not in (None, devices):
                message = (
                    f"the Trainer has {devices} devices, and srun starts {tasks} tasks on each node"
                )
                fix = f"write #SBATCH --ntasks-per-node={devices}"
                yield RULE.at(source, option, message, fix=fix)
                break


def check_shell(script: Script) -> Iterator[Finding]:
    """A launcher that waits for more or fewer nodes than start it.

    For example:

        #SBATCH --nodes=2
        srun torchrun --nnodes=4 train.py
    """
    yield from _only_first_node(script)

    for launch in launches(script):
        yield from _fewer_tasks(script, launch)
        yield from _standalone(script, launch)

        expected = least_nodes(launch)
        started = started_on_nodes(launch)
        # Of several tasks on a node, DL103 reports.
        if not expected or not started or (tasks_per_node(launch) or 1) > 1:
            continue

        container = launch.script.container
        is_of_manifest = container is not None and container.kind in _COUNTED
        if launch.srun is None and not is_of_manifest:
            continue

        most = most_nodes(launch) or started
        if expected > 1 and not expected <= started <= most:
            by = "srun" if launch.srun is not None else "the manifest"
            message = f"{launch.kind} waits for {expected} nodes, but {by} starts it on {started}"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)
        elif started > 1 and _is_alone(launch):
            how = "--standalone" if "standalone" in launch.flags else "without --nnodes"
            message = f"torchrun {how} runs on {started} nodes: each of them trains alone"
            yield RULE.at(script, launch.name[-1], message, fix=_JOIN)


def _only_first_node(script: Script) -> Iterator[Finding]:
    """A launcher in a batch script, which Slurm runs on the first of its nodes.

    For example:

        #SBATCH --nodes=2
        torchrun --nnodes=2 train.py
    """
    nodes = script.sbatch.number("nodes") or 1
    text = _HELPERS.sub("", _SUBSTITUTION.sub("", script.text))
    if nodes < 2 or _DISTRIBUTES.search(text):
        return

    for launch in launches(script):
        if launch.kind == PYTHON or launch.command.is_conditional:
            continue

        rest = "node" if nodes == 2 else f"{nodes - 1} nodes"
        message = (
            f"Slurm runs a batch script on its first node only: {launch.kind} is not started on the other "
            f"{rest}"
        )
        fix = f"start it with srun: srun {launch.kind} ..."
        if launch.kind == DEEPSPEED:
            fix = "add --hostfile"
        yield RULE.at(script, launch.name[-1], message, fix=fix)


def _fewer_tasks(script: Script, launch: Launch) -> Iterator[Finding]:
    """`export WORLD_SIZE=4` beside an srun of one task."""
    size = variable(launch, "WORLD_SIZE")
    if size is None or launch.srun is None or launch.kind != PYTHON:
        return

    ranks = whole_number(size.constant) or 0
    tasks = (tasks_per_node(launch) or 0) * (started_on_nodes(launch) or 0)
    if tasks and ranks > tasks:
        message = (
            f"WORLD_SIZE is {ranks}, and srun starts {tasks} tasks: "
            "the first waits for ranks that never start"
        )
        fix = "start a task for each rank: #SBATCH --ntasks-per-node"
        yield RULE.at(script, size, message, fix=fix, severity=Severity.WARNING)


def _standalone(script: Script, launch: Launch) -> Iterator[Finding]:
    """`torchrun --standalone --nnodes=2 train.py`"""
    nodes = least_nodes(launch) or 1
    if launch.is_torchrun and "standalone" in launch.flags and nodes > 1:
        message = f"--standalone is a job of one node, but torchrun waits for {nodes}"
        yield RULE.at(script, launch.flags["standalone"].word, message, fix=_JOIN)


def _is_alone(launch: Launch) -> bool:
    """Whether each of its nodes trains by itself, and not on purpose: tasks with different arguments
    are independent runs.

    For example:

        srun torchrun --standalone train.py
    """
    container = launch.script.container
    if container is not None and container.kind not in _ONE_JOB:
        return False

    is_on_one = "standalone" in launch.flags or most_nodes(launch) == 1
    return launch.is_torchrun and is_on_one and not uses_task_variable(launch)
