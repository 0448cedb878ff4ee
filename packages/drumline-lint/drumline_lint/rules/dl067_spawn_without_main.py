"""DL067: processes are spawned by code that every spawned process runs again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class, enclosing_function
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import TORCHRUN
from drumline_lint.reading.source import Source

RULE = rule("DL067", in_tests=False)
_SPAWNING = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`mp.spawn` that is reached when the file is imported: each process imports it first."""
    if source.is_notebook:
        return
    is_run_by_ranks = any(
        launch.kind == TORCHRUN and processes_per_node(launch) != 1
        for launch in program.launches_of(source)
    )
    for call in program.calls(source, *_SPAWNING):
        method = argument(call, None, "start_method")
        is_forked = method is not None and program.values(method) != {ConstantValue("spawn")}
        if is_run_by_ranks and not any(_choices(program, call)):
            message = "torchrun starts a process for each GPU, and each of them spawns more"
            yield RULE.at(source, call, message, fix="start it with python, or spawn nothing")
        elif not is_forked and _runs_at_import(program, call, set()):
            message = (
                "every spawned process imports this file and comes here again: "
                "the start fails with a RuntimeError"
            )
            # another condition may say that this is such a process
            severity = Severity.WARNING if any(_choices(program, call)) else None
            yield RULE.at(source, call, message, severity=severity)


def _choices(program: Program, call: ast.Call) -> Iterator[ast.expr]:
    """The conditions on the way to it, but for the one of a script."""
    function = enclosing_function(call)
    callers = [] if function is None else program.callers(function)
    for node in (call, *callers):
        tests = (test for test, _ in conditions(program, node))
        yield from (test for test in tests if "__name__" not in ast.unparse(test))


def _runs_at_import(program: Program, node: ast.AST, visited: set[ast.AST]) -> bool:
    """By calls of its own file: another one may be a notebook, which nobody imports."""
    if any("__name__" in ast.unparse(test) for test, _ in conditions(program, node)):
        return False
    function = enclosing_function(node)
    if function is None:
        return True
    if function in visited or enclosing_class(function) is not None:
        return False
    visited.add(function)
    callers = [
        call
        for call in program.callers(function)
        if program.source_of(call) is program.source_of(node)
    ]
    return any(_runs_at_import(program, call, visited) for call in callers)
