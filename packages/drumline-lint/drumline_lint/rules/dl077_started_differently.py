"""DL077: a script starts a training with other processes than its code expects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import processes_per_node, started_on_nodes, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch
from drumline_lint.reading.source import Source

RULE = rule("DL077", only_distributed=False)
# Code that looks whether there is a launcher, or does its work.
_OTHER_STARTS = re.compile(
    r"(?:get|getenv|setdefault|pop)\(\s*[\"'](?:LOCAL_RANK|RANK|WORLD_SIZE)\b"
    r"|[\"'](?:LOCAL_RANK|RANK|WORLD_SIZE)[\"'] (?:not )?in\b|environ\[[\"']RANK[\"']\] *="
    r"|SLURM_|OMPI_|\bspawn\(|Process\(|start_processes|environ\.update|is_torchelastic"
)
# A file that may export RANK; not one that only chooses what is installed.
_SOURCED = re.compile(
    r"(?:^|[\s;&|\"'(])(?:source|\.)[ \t]+(?![^\s;&|]*(?:activate|conda|bashrc|profile))[\w./${}~-]+"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    started = program.launches_of(source)
    if started:
        yield from _without_launcher(program, source, started)
        yield from _lightning(program, source, started)
        yield from _rank_of_task(program, source, started)


def _without_launcher(
    program: Program, source: Source, started: Sequence[Launch]
) -> Iterator[Finding]:
    """`python train.py`, where RANK has to be set."""
    if not all(map(_is_plain, started)) or framework(program, source):
        return
    if any(_OTHER_STARTS.search(near.text) for near in connected(program, source)):
        return
    for call in program.calls(source, INIT):
        is_from_environment = argument(call, 4, "rank") is None and _is_env(program, call)
        if is_from_environment and _is_always_called(program, call):
            for launch in started:
                message = f"{source.path.name} takes its rank from the environment, where nothing sets RANK"
                fix = "start it with torchrun"
                yield RULE.at(launch.script, launch.name[-1], message, fix=fix)
            return


def _rank_of_task(program: Program, source: Source, started: Sequence[Launch]) -> Iterator[Finding]:
    """SLURM_PROCID under torchrun, which is one task of Slurm."""
    has_launcher = all(launch.is_torchrun and processes_per_node(launch) != 1 for launch in started)
    for call in program.calls(source, INIT) if has_launcher else ():
        origins = written_values(program, argument(call, 4, "rank"))
        if origins and all("SLURM_PROCID" in ast.unparse(origin) for origin in origins):
            message = "all ranks that a torchrun starts have the same SLURM_PROCID"
            yield RULE.at(source, call, message, fix="leave out rank and world_size")


def _is_plain(launch: Launch) -> bool:
    is_here = launch.script.container is None and not launch.docker
    text = launch.script.text
    is_set = "RANK" in text or (launch.srun is not None and bool(_SOURCED.search(text)))
    return launch.kind == PYTHON and is_here and not is_set


def _is_env(program: Program, call: ast.Call) -> bool:
    method = argument(call, 1, "init_method")
    return method is None or program.values(method) == {ConstantValue("env://")}


def _is_always_called(program: Program, call: ast.Call) -> bool:
    function = enclosing_function(call)
    callers = program.callers(function) if function else []
    return not any(conditions(program, call)) and not any(
        "__name__" not in ast.unparse(test)
        for caller in callers
        for test, _ in conditions(program, caller)
    )


def _lightning(program: Program, source: Source, started: Sequence[Launch]) -> Iterator[Finding]:
    """Lightning refuses a job whose tasks are not its devices."""
    for call in program.calls(source, "pytorch_lightning.Trainer"):
        devices = _count(argument(call, None, "devices"))
        given_nodes = argument(call, None, "num_nodes")
        nodes = 1 if given_nodes is None else _count(given_nodes)
        for launch in started:
            tasks = tasks_per_node(launch)
            if (
                launch.kind != PYTHON
                or launch.srun is None
                or not devices
                or not nodes
                or not tasks
            ):
                continue
            allocated = started_on_nodes(launch)
            if devices != tasks or (allocated is not None and allocated != nodes):
                message = (
                    f"the Trainer expects {nodes} x {devices} processes, "
                    f"and srun starts {allocated or nodes} x {tasks}"
                )
                yield RULE.at(launch.script, launch.srun_word, message)


def _count(value: ast.expr | None) -> int | None:
    """As it is written in the call: whatever has a name, the command line may set."""
    if isinstance(value, ast.List):
        return len(value.elts)
    number = value.value if isinstance(value, ast.Constant) else None
    return number if isinstance(number, int) and number > 0 else None
