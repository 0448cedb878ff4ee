"""DL114: a node starts more ranks than it has GPUs, or leaves some of them idle."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import (
    allocated_gpus,
    gpus_per_node,
    processes_per_node,
    visible_devices,
)
from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes, variable
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL114")
_COUNTS = ("nproc-per-node", "num-processes", "num-gpus")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        processes = processes_per_node(launch)
        gpus = gpus_per_node(launch)
        # Tasks of Python may be something else than ranks.
        is_training = launch.kind != PYTHON or "MASTER_ADDR" in script.text
        by = "srun" if launch.kind == PYTHON else launch.kind
        yield from _other_gpus(script, launch)
        if finding := _total_of_one_machine(script, launch):
            yield finding
        elif processes and gpus and is_training and processes > gpus:
            has = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
            message = f"{by} starts {processes} ranks on a node that has {has}"
            yield RULE.at(script, _place(launch), message)


def _total_of_one_machine(script: Script, launch: Launch) -> Finding | None:
    """--num_processes of accelerate: fewer than the machines, or the name of a number of one."""
    total = launch.flags.get("num-processes") if launch.kind == ACCELERATE else None
    machines = least_nodes(launch) or 1
    if total is None or total.value is None or machines < 2:
        return None
    value = launch.value("num-processes") or ""
    is_less = value.isdigit() and int(value) < machines
    if not is_less and "PER_" not in total.value.variable and value != str(gpus_per_node(launch)):
        return None
    message = (
        f"--num_processes is the total of {machines} machines, and {total.value.text} that of one"
    )
    fix = "multiply it by the number of machines"
    return RULE.at(script, total.word, message, fix=fix, severity=Severity.WARNING)


def _other_gpus(script: Script, launch: Launch) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that names GPUs outside of the allocation, which count from 0, or that
    deepspeed ignores."""
    devices = variable(launch, "CUDA_VISIBLE_DEVICES")
    numbers = visible_devices(launch)
    gpus = allocated_gpus(launch)
    if devices is None or not numbers:
        return
    if gpus and max(numbers) >= gpus >= len(numbers):
        message = f"the job has {gpus} GPUs, and GPU {max(numbers)} is none of them"
        fix = "leave CUDA_VISIBLE_DEVICES as the scheduler sets it"
        yield RULE.at(script, devices, message, fix=fix)
    first_gpus = list(range(processes_per_node(launch) or 0))
    if launch.kind == DEEPSPEED and "num-gpus" in launch.flags and numbers != first_gpus:
        listed = ",".join(map(str, numbers))
        message = f"beside --num_gpus deepspeed ignores CUDA_VISIBLE_DEVICES={listed}, and takes the first GPUs"
        fix = f"replace both by --include localhost:{listed}"
        flag = launch.flags["num-gpus"].word
        yield RULE.at(script, flag, message, fix=fix, severity=Severity.WARNING)


def _place(launch: Launch) -> Word:
    for name in _COUNTS:
        if name in launch.flags:
            return launch.flags[name].word
    container = launch.script.container
    return container.processes if container and container.processes else launch.name[-1]
