"""Whether a process that comes to one place can also come to another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.program import Program
from drumline.lint.running.conditions import conditions
from drumline.lint.running.order import Step


def are_alternatives(program: Program, one: Step, other: Step) -> bool:
    """One is done only where a condition holds, the other only where it does not: no process does both."""
    known = set(_facts(program, one))
    return any((test, not holds) in known for test, holds in _facts(program, other))


def _facts(program: Program, step: Step) -> Iterator[tuple[str, bool]]:
    """The conditions on the way to it as they are written; `not` and `and` are taken apart."""
    for node in (*step.through, step.call):
        for test, holds in conditions(program, node):
            yield from _taken_apart(test, holds)


def _taken_apart(test: ast.expr, holds: bool) -> Iterator[tuple[str, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _taken_apart(test.operand, not holds)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        for part in test.values:
            yield from _taken_apart(part, holds)
    else:
        yield ast.unparse(test), holds
