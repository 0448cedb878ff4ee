"""DL114: a node starts more ranks than it has GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import (
    allocated_gpus,
    gpus_per_node,
    processes_per_node,
    visible_devices,
)
from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL114")
_COUNTS = ("nproc-per-node", "num-processes", "num-gpus")


def check_shell(script: Script) -> Iterator[Finding]:
    yield from _of_others(script)
    for launch in launches(script):
        processes = processes_per_node(launch)
        gpus = gpus_per_node(launch)
        if processes is None or gpus is None or not _is_training(script, launch):
            continue
        if processes > gpus > 0:
            has = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
            by = "srun" if launch.kind == PYTHON else launch.kind
            message = f"{by} starts {processes} ranks on a node that has {has}"
            yield RULE.at(script, _place(launch), message)


def _of_others(script: Script) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that names GPUs outside of the allocation, which count from 0."""
    reported: set[int] = set()
    for launch in launches(script):
        devices = variable(launch, "CUDA_VISIBLE_DEVICES")
        gpus = allocated_gpus(launch)
        numbers = visible_devices(launch)
        if devices is None or not gpus or not numbers or max(numbers) < gpus:
            continue
        if devices.assignment.start not in reported and len(numbers) <= gpus:
            reported.add(devices.assignment.start)
            message = f"the job has {gpus} GPUs, and GPU {max(numbers)} is none of them"
            fix = "leave CUDA_VISIBLE_DEVICES as the scheduler sets it"
            yield RULE.at(script, devices.assignment, message, fix=fix)


def _is_training(script: Script, launch: Launch) -> bool:
    """Tasks of Python may be something else than ranks."""
    return launch.kind != PYTHON or "MASTER_ADDR" in script.text


def _place(launch: Launch) -> Word:
    for name in _COUNTS:
        if name in launch.flags:
            return launch.flags[name].word
    container = launch.script.container
    return container.processes if container and container.processes else launch.name[-1]
