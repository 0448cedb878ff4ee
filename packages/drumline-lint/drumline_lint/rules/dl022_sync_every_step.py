"""DL022: every step waits for the GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import always_exits, rank_tests
from drumline_lint.flow.guards import is_now_and_then
from drumline_lint.flow.loops import repeated
from drumline_lint.flow.single_process import is_single_process
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    SCOPES,
    ancestors,
    last_name,
    nodes_in,
    position,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import is_method, round_functions, training_loops
from drumline_lint.training.tensors import is_given_cpu, is_of_step

RULE = rule("DL022", in_tests=False)
READING = ("item", "tolist", "numpy", "cpu")
NUMBERS = ("float", "int", "bool")
SHOWING = (
    "print",
    "write",
    "set_postfix",
    "set_postfix_str",
    "set_description",
    "info",
    "debug",
    "warning",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """One finding a loop, at the first statement that waits."""
    for statements in _waiting_statements(program):
        statement, (node, value) = min(statements.items(), key=lambda item: position(item[0]))
        num_others = len(statements) - 1
        if program.source_of(statement) is source:
            also = (
                f", and so do {num_others} other statements of this loop" if num_others > 1 else ""
            )
            also = ", and so does another statement of this loop" if num_others == 1 else also
            message = f"{source.code(node)} waits at every step until the GPU has computed {source.code(value)}{also}"
            yield RULE.at(source, node, message)


@cached_query
def _waiting_statements(program: Program) -> list[dict[ast.stmt, tuple[ast.expr, ast.expr]]]:
    """Of each loop, the statements that wait; a statement belongs to one loop."""
    every: list[dict[ast.stmt, tuple[ast.expr, ast.expr]]] = []
    waiting: set[ast.stmt] = set()
    for loop in training_loops(program):
        statements: dict[ast.stmt, tuple[ast.expr, ast.expr]] = {}
        for root, rare in round_functions(program, loop, _is_rare).items():
            for node in _written(root) if not rare else ():
                value = _read(program, node)
                statement = statement_of(node)
                if (
                    value is not None
                    and statement not in waiting
                    and not _is_rare(program, node, root)
                    and not is_single_process(program, statement)
                ):
                    whole = value if isinstance(node, ast.FormattedValue) else node
                    statements.setdefault(statement, (whole, value))
        waiting.update(statements)
        if statements:
            every.append(statements)
    return every


def _written(root: ast.AST) -> Iterator[ast.expr]:
    for part in repeated(root):
        if not isinstance(part, SCOPES):
            yield from nodes_in(part, ast.Call, ast.FormattedValue)


def _read(program: Program, node: ast.expr) -> ast.expr | None:
    values: list[ast.expr] = []
    if isinstance(node, ast.FormattedValue):
        values = [node.value]
    elif isinstance(node, ast.Call):
        name = last_name(node.func)
        if is_method(node, *READING) or _is_moved_to_host(node):
            assert isinstance(node.func, ast.Attribute)
            values = [node.func.value]
        elif name in NUMBERS and isinstance(node.func, ast.Name):
            values = node.args[:1]
        elif name in SHOWING:
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return next((value for value in values if is_of_step(program, value)), None)


def _is_moved_to_host(call: ast.Call) -> bool:
    """`.to("cpu")` without non_blocking."""
    waits = not any(keyword.arg == "non_blocking" for keyword in call.keywords)
    return is_method(call, "to") and waits and is_given_cpu(call)


def _is_rare(program: Program, node: ast.AST, until: ast.AST) -> bool:
    if is_now_and_then(program, node, until):
        return True
    shown = _is_shown(node)
    inner: ast.AST = node
    for outer in ancestors(node):
        if outer is until:
            break
        if isinstance(outer, ast.Raise | ast.Assert | ast.ExceptHandler):
            return True
        if isinstance(outer, ast.If) and inner is not outer.test:
            block = outer.body if inner in outer.body else outer.orelse
            if always_exits(program, block) and not isinstance(
                block[-1], ast.Continue | ast.Return
            ):
                return True
            if _is_one_step(program, outer.test) or (shown and _is_on_value(program, outer.test)):
                return True
        inner = outer
    return False


def _is_shown(node: ast.AST) -> bool:
    statement = statement_of(node)
    shown = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(shown, ast.Call) and last_name(shown.func) in SHOWING


def _is_on_value(program: Program, test: ast.expr) -> bool:
    """`if torch.max(y) > 1:` asks for what should not be; that it waits, too, is another matter."""
    return any(is_of_step(program, part) for part in nodes_in(test, ast.Compare, ast.Call))


def _is_one_step(program: Program, test: ast.expr) -> bool:
    """`step == 0`, `i < 3`; not `rank == 0`."""
    if rank_tests(program, test):
        return False
    return any(
        isinstance(operator, ast.Eq | ast.Lt | ast.LtE | ast.In)
        for compared in nodes_in(test, ast.Compare)
        for operator in compared.ops
    )
