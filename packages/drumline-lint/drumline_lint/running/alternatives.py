"""Whether a process that comes to one place can also come to another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.program import Program
from drumline_lint.running.conditions import known_parts
from drumline_lint.running.order import Step


def are_alternatives(program: Program, one: Step, other: Step) -> bool:
    """One is done only where a condition holds, the other only where it does not: no process does both."""
    known = set(_facts(program, one))
    return any((test, not holds) in known for test, holds in _facts(program, other))


def _facts(program: Program, step: Step) -> Iterator[tuple[str, bool]]:
    """The conditions on the way to it as they are written; `not` and `and` are taken apart."""
    for node in (*step.through, step.call):
        yield from ((ast.unparse(test), holds) for test, holds in known_parts(program, node))
