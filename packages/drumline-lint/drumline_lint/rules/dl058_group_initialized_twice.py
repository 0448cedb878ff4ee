"""DL058: a run initializes the default process group twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive, conditions
from drumline_lint.flow.run_order import Run, found_in_runs, process_of
from drumline_lint.program.names import DESTROY, INIT
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL058", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The second of two calls that one process makes, with nothing asked and nothing destroyed
    between them."""
    for call, first in found_in_runs(program, source, _second_calls).items():
        where = program.source_of(first)
        line = where.where(first)
        place = line if where is source else f"{where.path.name}, {line}"
        message = f"the default group is already initialized ({place}): this call raises"
        yield RULE.at(source, call, message)


def _second_calls(program: Program, run: Run) -> Iterator[tuple[ast.AST, ast.AST]]:
    earlier: dict[tuple[ast.AST, ...], ast.Call] = {}
    for step in run:
        name = program.name_of(step.call.func)
        if name not in (INIT, DESTROY):
            continue
        process = process_of(program, step)
        if name == DESTROY:
            earlier.pop(process, None)
        if name != INIT or any(_is_choice(program, node) for node in (step.call, *step.through)):
            continue
        first = earlier.setdefault(process, step.call)
        if first is not step.call and not are_exclusive(program, first, step.call):
            yield step.call, first


def _is_choice(program: Program, node: ast.AST) -> bool:
    """Whether any condition decides about it, but that of a script."""
    return any("__name__" not in ast.unparse(test) for test, _ in conditions(program, node))
