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
        cpus = _cpus_per_task(launch)
        if threads is None or value is None or not value.isdigit() or cpus is None:
            continue
        ranks = 1 if launch.kind == PYTHON else processes_per_node(launch) or 1
        if int(value) * ranks > cpus and threads.assignment.start not in reported:
            reported.add(threads.assignment.start)
            message = f"{ranks} x {value} threads share the {cpus} CPUs of a task"
            yield RULE.at(script, threads.assignment, message)


def _cpus_per_task(launch: Launch) -> int | None:
    if launch.is_elsewhere or not header(launch).by_name:
        return None
    srun = launch.srun.number("cpus-per-task") if launch.srun else None
    return srun or header(launch).number("cpus-per-task")
