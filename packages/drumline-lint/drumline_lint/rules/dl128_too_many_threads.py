"""DL128: the ranks of a node have more threads or workers than Slurm gives them CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import processes_per_node, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import variable
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import whole_number
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL128")
_EVERY_CORE = re.compile(r"\$\(nproc(?: --all)?\)|`nproc`")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The workers that the code of a training writes down."""
    started = program.launches_of(source)
    for loader in program.calls(source, LOADER) if started else ():
        workers = given(loader, "num_workers")
        counts = [item.value for item in program.values(workers) if isinstance(item, ConstantValue)]
        count = counts[0] if len(counts) == 1 and isinstance(counts[0], int) else 0
        for launch in started:
            cpus = _cpus(launch) if _asks_for_cpus(launch) else None
            if cpus and count * _ranks(launch) > 2 * cpus:
                message = f"{_ranks(launch)} x {count} workers of the DataLoader share {cpus} CPUs"
                fix = "ask for more: #SBATCH --cpus-per-task"
                yield RULE.at(source, workers, message, fix=fix)
                break


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        threads = variable(launch, "OMP_NUM_THREADS")
        cpus = _cpus(launch)
        if threads is None:
            continue
        count = whole_number(threads.constant)
        written = script.substituted(threads.value.text)
        if _EVERY_CORE.fullmatch(written) and _ranks(launch) > 1:
            message = f"each of {_ranks(launch)} ranks has as many threads as there are CPUs"
            yield RULE.at(script, threads, message)
        elif count and cpus and count * _ranks(launch) > cpus:
            message = f"{_ranks(launch)} x {count} threads share {cpus} CPUs"
            yield RULE.at(script, threads, message)


def _asks_for_cpus(launch: Launch) -> bool:
    """Where nothing is asked for, a cluster may give each GPU its share of CPUs; tasks that are one
    rank each have one CPU."""
    batch = launch.script.sbatch
    options = {*batch.by_name, *(launch.srun.by_name if launch.srun else ())}
    is_rank = launch.kind == PYTHON and (tasks_per_node(launch) or 1) > 1
    return is_rank or any("cpu" in name for name in options)


def _ranks(launch: Launch) -> int:
    """Those that a task starts."""
    return 1 if launch.kind == PYTHON else processes_per_node(launch) or 1


def _cpus(launch: Launch) -> int | None:
    """Those of a task; a batch script itself has those of all tasks of its node."""
    batch = launch.script.sbatch
    if launch.is_elsewhere or not batch.by_name:
        return None
    per_task = batch.number("cpus-per-task")
    if launch.srun is None:
        tasks = batch.number("ntasks-per-node") or batch.number("ntasks") or 1
        return per_task and per_task * tasks
    asks = [name for name in (*batch.by_name, *launch.srun.by_name) if "cpu" in name]
    if not asks and not {"exclusive", "threads-per-core"} & batch.by_name.keys():
        return 1  # for a task that shares its nodes and asks for none
    return launch.srun.number("cpus-per-task") or per_task
