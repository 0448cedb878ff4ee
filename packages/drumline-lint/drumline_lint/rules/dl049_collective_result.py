"""DL049: the result of a collective is used on ranks that do not get it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rank_tests_at
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ScopeNode,
    ancestors,
    called_name,
    calls_beside,
    dotted,
    enclosing_function,
    is_after,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.reading.source import Source

RULE = rule("DL049")
DEEPEST = 3
_SENDING = ("broadcast", "all_reduce", "broadcast_object_list")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`dist.reduce(loss, 0)`, by whose result every rank steps a scheduler or leaves a loop."""
    for call in program.calls(source, "torch.distributed.reduce"):
        tensor = dotted(call.args[0]) if call.args else ""
        if not tensor or any(rank_tests_at(program, call)) or _is_sent(call):
            continue
        for scope, name in _holders(program, scope_of(call), tensor):
            if use := _decision(program, scope, name):
                line = program.source_of(use).place(use).line
                message = (
                    f"only one rank gets the result of {source.code(call.func)}, "
                    f"and every rank decides by it in line {line}"
                )
                yield RULE.at(source, call, message)
                break


def _is_sent(call: ast.Call) -> bool:
    """Whether the function sends something to all ranks afterwards."""
    later_calls = [later for later in calls_beside(call) if is_after(later, call)]
    return any(called_name(later) in _SENDING for later in later_calls)


def _holders(
    program: Program, scope: ScopeNode, name: str, depth: int = 0
) -> Iterator[tuple[ScopeNode, str]]:
    """The functions that have the result, each with its name there."""
    yield scope, name
    returns = nodes_in(scope, ast.Return)
    is_returned = any(name in map(dotted, nodes_in(value, ast.Name)) for value in returns)
    function = scope if isinstance(scope, ast.FunctionDef) else None
    if function is None or not is_returned:
        return
    for assignment in _assignments(program, function, depth):
        target = dotted(assignment.targets[0])
        if target:
            yield from _holders(program, scope_of(assignment), target, depth + 1)


def _assignments(program: Program, function: ast.FunctionDef, depth: int) -> Iterator[ast.Assign]:
    """The statements that assign what a function returns, also through functions that return it."""
    for caller in program.callers(function) if depth < DEEPEST else ():
        statement = parent_of(caller)
        outer = enclosing_function(caller)
        if isinstance(statement, ast.Assign):
            yield statement
        elif isinstance(statement, ast.Return) and isinstance(outer, ast.FunctionDef):
            yield from _assignments(program, outer, depth + 1)


def _decision(program: Program, scope: ScopeNode, name: str) -> ast.AST | None:
    """The step of a scheduler with the value, or a comparison of it in a loop that breaks."""
    names: list[ast.Name] = nodes_in(scope, ast.Name)
    for use in names:
        is_read = dotted(use) == name and isinstance(use.ctx, ast.Load)
        if not is_read or any(rank_tests_at(program, use)):
            continue
        step = parent_of(use)
        if isinstance(step, ast.Call) and called_name(step) == "step" and use in step.args:
            return step
        branch = next((outer for outer in ancestors(use) if isinstance(outer, ast.If)), None)
        loop = loop_around(use)
        is_tested = branch is not None and branch.test in (use, *ancestors(use))
        if is_tested and loop is not None and nodes_in(loop, ast.Break):
            return use
    return None
