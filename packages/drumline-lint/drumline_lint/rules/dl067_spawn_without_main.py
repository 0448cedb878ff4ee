"""DL067: processes are spawned by code that every spawned process runs again.

A process that is spawned imports the file of its function, and runs what that file does at import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import TORCHRUN
from drumline_lint.reading.source import Source
from drumline_lint.training.models import has_devices

RULE = rule("DL067", only_distributed=False, in_tests=False)

_SPAWNING = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_TRAINER = "pytorch_lightning.Trainer"
# Strategies of Lightning that start the script again.
_STARTING = ("ddp", "ddp_spawn", "fsdp", "deepspeed")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`mp.spawn` that is reached when the file is imported: each process imports it first.

    For example:

        world_size = torch.cuda.device_count()
        mp.spawn(train, args=(world_size,), nprocs=world_size)
    """
    is_run_by_ranks = any(
        launch.kind == TORCHRUN and processes_per_node(launch) != 1
        for launch in program.launches_of(source)
    )

    for call in program.calls(source, *_SPAWNING):
        tests = _tests(program, call)
        if is_run_by_ranks and all("__name__" in test for test in tests):
            message = "torchrun starts a process for each GPU, and each of them spawns more"
            yield RULE.at(source, call, message, fix="start it with python, or spawn nothing")
        elif not _is_forked(program, call):
            yield from _not_imported(program, source, call, is_chosen=bool(tests))

    if source.is_notebook:
        yield from _by_trainer(program, source)


def _tests(program: Program, call: ast.Call) -> list[str]:
    """The conditions around it, and around the calls of its function: `__name__ == "__main__"`."""
    function = enclosing_function(call)
    nodes = [call, *(program.callers(function) if function is not None else ())]
    return [ast.unparse(test) for node in nodes for test, _ in conditions(program, node)]


def _is_forked(program: Program, call: ast.Call) -> bool:
    """`start_processes(train, start_method="fork")`: such a process imports nothing."""
    method = argument(call, None, "start_method")
    return method is not None and program.values(method) != {ConstantValue("spawn")}


def _not_imported(
    program: Program, source: Source, call: ast.Call, *, is_chosen: bool
) -> Iterator[Finding]:
    """A spawned process imports the file, which spawns again, or cannot import a notebook.

    `is_chosen`: whether a condition decides if the call is reached.
    """
    if not is_chosen and _runs_at_import(program, call):
        message = (
            "every spawned process imports this file and comes here again: "
            "the start fails with a RuntimeError"
        )
        yield RULE.at(source, call, message)
    elif source.is_notebook and _starts_own(program, call):
        message = (
            "a spawned process cannot import a function of a notebook: "
            "it fails with an AttributeError"
        )
        fix = "put the function into a file, or use accelerate's notebook_launcher"
        yield RULE.at(source, call, message, fix=fix)


def _runs_at_import(program: Program, call: ast.Call) -> bool:
    """By itself, or by a call of its function outside of all functions of its file.

    For example:

        def main():
            mp.spawn(train, nprocs=4)

        main()
    """
    source = program.source_of(call)
    if source.is_notebook:
        return False

    function = enclosing_function(call)
    callers = [call] if function is None else program.callers(function)
    return any(
        enclosing_function(caller) is None and program.source_of(caller) is source
        for caller in callers
    )


def _starts_own(program: Program, call: ast.Call) -> bool:
    """Whether the function is of this notebook, and not of a file that it imports.

    For example:

        def train(rank):
            ...

        mp.spawn(train, nprocs=4)
    """
    source = program.source_of(call)
    started = program.started_functions(call)
    return any(program.source_of(function) is source for function in started)


def _by_trainer(program: Program, source: Source) -> Iterator[Finding]:
    """A Trainer in a notebook, which it would start again.

    For example:

        trainer = Trainer(strategy="ddp", devices=4)
    """
    for call in program.calls(source, _TRAINER):
        values = program.values(argument(call, None, "strategy"))
        names = [value.value for value in values if isinstance(value, ConstantValue)]
        if len(names) != 1 or names[0] not in _STARTING:
            continue

        if has_devices(program, call):
            message = (
                f'strategy="{names[0]}" starts the script again for each device: a notebook is none'
            )
            yield RULE.at(source, call, message, fix='write strategy="ddp_notebook"')
