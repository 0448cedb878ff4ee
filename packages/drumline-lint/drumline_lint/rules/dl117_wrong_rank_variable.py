"""DL117: a rank or a world size is taken from a variable that counts something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import header, started_on_nodes, tasks_per_node
from drumline_lint.reading.environment import scopes, variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Kind, Word

RULE = rule("DL117")
_LOCAL_RANKS = {"SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"}
_GLOBAL_RANKS = {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
_COUNTS_OF_A_NODE = {
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_COUNTS_OF_NODES = {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"}
_WRONG_FOR = {
    "RANK": _LOCAL_RANKS,
    "LOCAL_RANK": _GLOBAL_RANKS | {"SLURM_NODEID"},
    "WORLD_SIZE": _COUNTS_OF_A_NODE,
}
_WRONG_FOR_FLAG = {
    "node-rank": _LOCAL_RANKS | {"LOCAL_RANK"},
    "machine-rank": _LOCAL_RANKS | {"LOCAL_RANK"},
    "nnodes": _COUNTS_OF_A_NODE,
    "nproc-per-node": _COUNTS_OF_NODES | {"SLURM_NTASKS", "SLURM_NPROCS"},
}
_WITH_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=?][^{}]*\}")


def check_shell(script: Script) -> Iterator[Finding]:
    started = launches(script)
    if _is_on_one_node(script) or (not started and "SLURM" not in script.text):
        return
    wrong: Mapping[str, set[str]] = _wrong_sources(started) if _has_ranks(started) else {}
    for scope in scopes(script, started):
        for assignment in scope.assignments:
            source = _only_variable(assignment.value)
            if source in wrong.get(assignment.name, set()):
                message = f"{assignment.name} is set to ${source}, which is {_meaning(source)}"
                yield RULE.at(script, assignment, message)
    for launch in started:
        yield from _of_flags(script, launch)
        yield from _of_world_size(script, launch)


def _is_on_one_node(script: Script) -> bool:
    """There, the local and the global values are the same."""
    options = script.sbatch.by_name
    is_default = bool(options) and options.keys().isdisjoint({"nodes", "ntasks"})
    return is_default or script.sbatch.number("nodes") == 1


def _of_flags(script: Script, launch: Launch) -> Iterator[Finding]:
    for name, flag in launch.flags.items():
        source = _only_variable(flag.value) if flag.value else ""
        wrong = _WRONG_FOR_FLAG.get(name, set())
        if name in {"node-rank", "machine-rank"} and (tasks_per_node(launch) or 1) > 1:
            wrong = wrong | _GLOBAL_RANKS
        is_total = source in {"SLURM_NTASKS", "SLURM_NPROCS"}
        if source in wrong and not (is_total and (started_on_nodes(launch) or 1) < 2):
            yield RULE.at(
                script, flag.word, f"--{name} is set to ${source}, which is {_meaning(source)}"
            )


def _of_world_size(script: Script, launch: Launch) -> Iterator[Finding]:
    """A number that is not the number of tasks of srun."""
    size = variable(launch, "WORLD_SIZE")
    value = size.script.constant(size.assignment.value) if size else None
    tasks = tasks_per_node(launch)
    nodes = started_on_nodes(launch)
    if size is None or launch.kind != PYTHON or launch.srun is None or not tasks or not nodes:
        return
    is_number = value is not None and value.isascii() and value.isdigit()
    is_named = bool(_only_variable(size.assignment.value))
    if is_number and not is_named and tasks > 1 and int(value or 0) != nodes * tasks:
        message = f"WORLD_SIZE is {value}, and srun starts {nodes * tasks} ranks"
        yield RULE.at(script, size.assignment, message)


def _has_ranks(started: list[Launch]) -> bool:
    """torchrun and others set the variables of their ranks themselves."""
    return not started or any(launch.kind == PYTHON for launch in started)


def _wrong_sources(started: list[Launch]) -> Mapping[str, set[str]]:
    ranks = [launch for launch in started if launch.kind == PYTHON and launch.srun is not None]
    if not any(_runs_several(launch) for launch in ranks):
        return _WRONG_FOR
    return _WRONG_FOR | {
        "RANK": _LOCAL_RANKS | {"SLURM_NODEID"},
        "WORLD_SIZE": _COUNTS_OF_A_NODE | _COUNTS_OF_NODES,
    }


def _runs_several(launch: Launch) -> bool:
    return (tasks_per_node(launch) or 1) > 1 and header(launch).number("nodes") != 1


def _meaning(source: str) -> str:
    if source in _LOCAL_RANKS | {"LOCAL_RANK"}:
        return "the rank among the processes of one node"
    if source in _GLOBAL_RANKS:
        return "the rank among all processes"
    if source in _COUNTS_OF_A_NODE:
        return "a number of one node"
    if source in {"SLURM_NTASKS", "SLURM_NPROCS"}:
        return "the number of tasks on all nodes"
    return "the number of a node" if source == "SLURM_NODEID" else "the number of nodes"


def _only_variable(word: Word) -> str:
    if len(word.pieces) != 1:
        return ""
    piece = word.pieces[0]
    if piece.kind is Kind.VARIABLE:
        return piece.text
    match = _WITH_DEFAULT.fullmatch(piece.text) if piece.kind is Kind.UNKNOWN else None
    return match[1] if match else ""
