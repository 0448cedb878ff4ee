"""DL103: several launchers on a node, each of which starts all ranks of the node."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import (
    mpirun_processes,
    processes_per_node,
    tasks_per_node,
    uses_task_variable,
)
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import backend, most_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL103")


def check_shell(script: Script) -> Iterator[Finding]:
    """Launchers that start all ranks of a node, in each of several tasks on it.

    One launcher for each rank is odd, but works if all of them are counted as nodes.

        #SBATCH --ntasks-per-node=4
        srun torchrun --nproc-per-node=4 train.py
    """
    for launch in launches(script):
        tasks = tasks_per_node(launch) or mpirun_processes(launch) or 1
        starts_all_ranks = launch.kind != PYTHON and processes_per_node(launch) != 1
        if tasks < 2 or not starts_all_ranks or uses_task_variable(launch):
            continue

        starter = launch.srun_word or launch.mpirun[0]
        beginning = f"{starter.plain} starts {launch.kind} {tasks} times on each node"
        if _is_rendezvous_of_one(launch):
            message = (
                f"{beginning}, and their rendezvous is for one launcher: that one starts all "
                "ranks with the cores of its task, and the others wait or fail"
            )
            yield RULE.at(script, starter, message, severity=Severity.WARNING)
            continue

        message = (
            f"{beginning}, and each of them starts all ranks of the node: too many processes, "
            "which do not find each other or run out of GPU memory"
        )
        yield RULE.at(script, starter, message)


def _is_rendezvous_of_one(launch: Launch) -> bool:
    """Whether all launchers have the same rendezvous, which takes one node."""
    return most_nodes(launch) == 1 and backend(launch) == "c10d" and "rdzv-endpoint" in launch.flags
