"""Which variables of the environment a file sets, and to what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.program.program import Program
from drumline_lint.program.value import Known, Library
from drumline_lint.reading.source import Source

ENVIRONMENT = Library("os.environ")


@dataclass(frozen=True)
class Setting:
    """A variable that is set in any case: `setdefault` leaves what the launcher said, and is not one."""

    name: str
    value: ast.expr | None
    node: ast.AST


def settings(program: Program, source: Source) -> list[Setting]:
    """By an assignment, `os.putenv`, or `os.environ.update`."""
    return program.remember(("settings", source), lambda: list(_find_settings(program, source)))


def _find_settings(program: Program, source: Source) -> Iterator[Setting]:
    if "environ" not in source.text and "putenv" not in source.text:
        return
    for statement in program.index(source).every(ast.Assign):
        for target in statement.targets:
            yield from _assigned(program, target, statement.value, statement)
    for call in program.index(source).calls.get("putenv", ()):
        if program.name_of(call.func) == "os.putenv" and len(call.args) == 2:
            yield from _set(program, call.args[0], call.args[1], call)
    for call in program.index(source).calls.get("update", ()):
        if program.name_of(call.func) == "os.environ.update":
            yield from _updated(program, call)


def _assigned(
    program: Program, target: ast.expr, value: ast.expr | None, statement: ast.Assign
) -> Iterator[Setting]:
    if isinstance(target, ast.Tuple | ast.List):
        parts = getattr(value, "elts", None) or [None] * len(target.elts)
        for inner, part in zip(target.elts, parts, strict=False):
            yield from _assigned(program, inner, part, statement)
    elif isinstance(target, ast.Subscript) and ENVIRONMENT in program.values(target.value):
        yield from _set(program, target.slice, value, statement)


def _updated(program: Program, call: ast.Call) -> Iterator[Setting]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield Setting(keyword.arg, keyword.value, keyword)
    for given in call.args:
        written = [given, *(program.assigned(given) if isinstance(given, ast.Name) else [])]
        for one in written:
            if isinstance(one, ast.Dict):
                for key, value in zip(one.keys, one.values, strict=True):
                    if key is not None:
                        yield from _set(program, key, value, key)


def _set(program: Program, name: ast.expr, value: ast.expr | None, node: ast.AST) -> Iterator[Setting]:
    for known in program.values(name):
        if isinstance(known, Known) and isinstance(known.value, str):
            yield Setting(known.value, value, node)
