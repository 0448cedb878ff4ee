"""DL067: processes are spawned by code that every spawned process runs again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function
from drumline_lint.reading.source import Source

RULE = rule("DL067", in_tests=False)
_SPAWNING = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`mp.spawn` that is reached when the file is imported: each process imports it first."""
    if source.is_notebook:
        return
    for call in program.calls(source, *_SPAWNING):
        if source.path.name in program.started_by_torchrun:
            message = "torchrun starts a process for each GPU, and each of them spawns more"
            yield RULE.at(source, call, message, fix="start it with python, or spawn nothing")
            continue
        if _runs_at_import(program, call, set()):
            message = (
                "every spawned process imports this file and comes here again: "
                "the start fails with a RuntimeError"
            )
            yield RULE.at(source, call, message)


def _runs_at_import(program: Program, node: ast.AST, visited: set[ast.AST]) -> bool:
    if any("__name__" in ast.unparse(test) for test, _ in conditions(program, node)):
        return False
    function = enclosing_function(node)
    if function is None:
        return True
    if function in visited:
        return False
    visited.add(function)
    return any(_runs_at_import(program, call, visited) for call in program.callers(function))
