"""DL128: the ranks of a node have more threads than Slurm gives them CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import header, processes_per_node
from drumline_lint.reading.environment import ScopedAssignment, variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL128")
_MORE = "ask for more: #SBATCH --cpus-per-task"
_EVERY_CORE = re.compile(r"\$\(nproc(?: --all)?\)|`nproc`|\$\(getconf _NPROCESSORS_ONLN\)")
_WORKERS_FLAG = re.compile(r"--?(?:[\w.-]*[-_.])?(?:num[-_])?workers?(?:=|$)", re.IGNORECASE)
_WORKERS = re.compile(
    r"(?:^| )--?(?:[\w.-]*[-_.])?(?:num[-_])?workers?[= ](\d{1,4})(?: |$)", re.IGNORECASE
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The workers that the code of a training writes down."""
    started = program.launches_of(source)
    for loader in program.calls(source, LOADER) if started else ():
        workers = given(loader, "num_workers")
        counts = [item.value for item in program.values(workers) if isinstance(item, ConstantValue)]
        count = counts[0] if len(counts) == 1 and isinstance(counts[0], int) else 0
        for launch in started:
            if message := _about_workers(launch, count):
                yield RULE.at(source, workers, message, fix=_MORE)
                break


def check_shell(script: Script) -> Iterator[Finding]:
    reported: set[int] = set()
    for launch in launches(script):
        yield from _of_workers(script, launch)
        threads = variable(launch, "OMP_NUM_THREADS")
        value = threads.script.constant(threads.assignment.value) if threads else None
        cpus = _cpus(launch)
        if (
            threads is not None
            and _is_every_core(threads)
            and (processes_per_node(launch) or 1) > 1
        ):
            message = (
                f"each of {processes_per_node(launch)} ranks has as many threads as there are CPUs"
            )
            yield RULE.at(script, threads.assignment, message)
        if threads is None or value is None or not value.isdigit() or cpus is None:
            continue
        ranks = 1 if launch.kind == PYTHON else processes_per_node(launch) or 1
        if int(value) * ranks > cpus and threads.assignment.start not in reported:
            reported.add(threads.assignment.start)
            message = f"{ranks} x {value} threads share {cpus} CPUs"
            yield RULE.at(script, threads.assignment, message)


def _is_every_core(threads: ScopedAssignment) -> bool:
    pieces = threads.assignment.value.pieces
    return len(pieces) == 1 and bool(_EVERY_CORE.fullmatch(pieces[0].text))


def _of_workers(script: Script, launch: Launch) -> Iterator[Finding]:
    words = [launch.script.constant(word) or "" for word in launch.arguments]
    workers = _WORKERS.search(" ".join(words))
    if workers and (message := _about_workers(launch, int(workers[1]))):
        place = next(word for word in launch.arguments if _WORKERS_FLAG.match(word.head))
        yield RULE.at(script, place, message, fix=_MORE)


def _about_workers(launch: Launch, workers: int) -> str:
    """Where each worker of a DataLoader has less than half a CPU."""
    cpus = _cpus(launch) or _default_cpus(launch)
    ranks = 1 if launch.kind == PYTHON else processes_per_node(launch) or 1
    is_crowded = cpus is not None and workers * ranks > 2 * cpus
    return f"{ranks} x {workers} workers of the DataLoader share {cpus} CPUs" if is_crowded else ""


def _default_cpus(launch: Launch) -> int | None:
    """One, for each task of a job that shares its nodes and asks for none."""
    batch = header(launch)
    asks = any("cpu" in name or name == "threads-per-core" for name in batch.by_name)
    asks = asks or bool(launch.srun and any("cpu" in name for name in launch.srun.by_name))
    is_shared = bool(batch.by_name) and "exclusive" not in batch.by_name
    return 1 if is_shared and not asks and launch.srun is not None else None


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
