"""DL128: the ranks of a node have more threads than Slurm gives them CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import header, processes_per_node
from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL128")


def check_shell(script: Script) -> Iterator[Finding]:
    reported: set[int] = set()
    for launch in launches(script):
        threads = variable(launch, "OMP_NUM_THREADS")
        value = threads.script.constant(threads.assignment.value) if threads else None
        cpus = _cpus(launch)
        if threads is None or value is None or not value.isdigit() or cpus is None:
            continue
        ranks = 1 if launch.kind == PYTHON else processes_per_node(launch) or 1
        if int(value) * ranks > cpus and threads.assignment.start not in reported:
            reported.add(threads.assignment.start)
            message = f"{ranks} x {value} threads share {cpus} CPUs"
            yield RULE.at(script, threads.assignment, message)


def _cpus(launch: Launch) -> int | None:
    """Those of a task; a batch script itself has those of all tasks of its node."""
    batch = header(launch)
    if launch.is_elsewhere or not batch.by_name:
        return None
    per_task = batch.number("cpus-per-task")
    if launch.srun is not None:
        return launch.srun.number("cpus-per-task") or per_task
    tasks = batch.number("ntasks-per-node") or batch.number("ntasks") or 1
    return per_task and per_task * tasks
