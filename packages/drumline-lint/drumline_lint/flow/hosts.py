"""Environment variables and addresses that code sets, and whether all processes are on one host."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.value import ConstantValue, Library
from drumline_lint.reading.source import Source

ENVIRONMENT = Library("os.environ")
# Code without these words may be for one node, which has one local rank 0.
NODES = re.compile(r"n_?nodes|num_nodes|node_?rank|nodeid|multi[-_ ]?node", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """A variable that is always set; not by `setdefault`, which keeps the launcher's value."""

    name: str
    value: ast.expr | None
    node: ast.AST


@cached_query
def settings(program: Program, source: Source) -> list[Setting]:
    """The variables that a file sets, by an assignment or by `os.environ.update`."""
    return list(_find_settings(program, source))


def _find_settings(program: Program, source: Source) -> Iterator[Setting]:
    """`os.environ["MASTER_ADDR"] = "localhost"`, `os.environ.update(RANK="0")`."""
    if "environ" not in source.text:
        return

    for statement in program.index(source).every(ast.Assign):
        for target in statement.targets:
            yield from _assigned(program, target, statement.value, statement)

    for call in program.index(source).calls.get("update", ()):
        if program.name_of(call.func) == "os.environ.update":
            yield from _updated(program, call)


def _assigned(
    program: Program, target: ast.expr, value: ast.expr | None, statement: ast.Assign
) -> Iterator[Setting]:
    """What one target of an assignment sets; of `os.environ["A"], os.environ["B"] = "1", "2"`,
    both."""
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = getattr(value, "elts", None) or [None] * len(target.elts)
        for inner, part in zip(target.elts, parts, strict=False):
            yield from _assigned(program, inner, part, statement)

    elif isinstance(target, ast.Subscript) and ENVIRONMENT in program.values(target.value):
        yield from _set(program, target.slice, value, statement)


def _updated(program: Program, call: ast.Call) -> Iterator[Setting]:
    """`os.environ.update(RANK="0")`, and the same with a dictionary."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield Setting(keyword.arg, keyword.value, keyword)

    for values in call.args:
        assigned = program.assigned(values) if isinstance(values, ast.Name) else []
        for mapping in (values, *assigned):
            if isinstance(mapping, ast.Dict):
                yield from _of_mapping(program, mapping)


def _of_mapping(program: Program, mapping: ast.Dict) -> Iterator[Setting]:
    """`{"RANK": "0"}`; of `{**settings}` nothing is known."""
    for key, value in zip(mapping.keys, mapping.values, strict=True):
        if key is not None:
            yield from _set(program, key, value, key)


def _set(
    program: Program, name: ast.expr, value: ast.expr | None, node: ast.AST
) -> Iterator[Setting]:
    """One setting for each name that an expression may be."""
    for constant in program.values(name):
        if isinstance(constant, ConstantValue) and isinstance(constant.value, str):
            yield Setting(constant.value, value, node)
