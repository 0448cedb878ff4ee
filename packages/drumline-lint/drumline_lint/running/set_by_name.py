"""Attributes that are set without being written: `setattr(trainer, name, value)`, `vars(trainer).update(options)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name, up
from drumline_lint.program.value import Instance, Known
from drumline_lint.reading.source import Source

_CHANGING = {"update", "setdefault", "__setitem__"}


def may_be_set_by_name(program: Program, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether one of the given files does so to this attribute of a class, or of something that may be one."""
    changed = program.remember(
        "set by name", lambda: [one for source in program.sources for one in _changed(program, source)]
    )
    return any(
        (name is None or name == attribute) and _may_be(program, thing, owner) for thing, name in changed
    )


def _changed(program: Program, source: Source) -> Iterator[tuple[ast.expr, str | None]]:
    """What is changed so, and which attribute of it; None where that is not known."""
    index = program.index(source)
    for call in index.calls.get("setattr", ()):
        if isinstance(call.func, ast.Name) and len(call.args) == 3:
            yield call.args[0], _only_name(program, call.args[1])
    for call in index.calls.get("vars", ()):
        if isinstance(call.func, ast.Name) and call.args and _is_changed(call):
            yield call.args[0], None
    for node in index.every(ast.Attribute) if "__dict__" in source.text else ():
        if node.attr == "__dict__" and (isinstance(node.ctx, ast.Store) or _is_changed(node)):
            yield node.value, None


def _only_name(program: Program, name: ast.expr) -> str | None:
    known = [one.value for one in program.values(name) if isinstance(one, Known)]
    return str(known[0]) if len(known) == len(program.values(name)) == 1 else None


def _is_changed(attributes: ast.expr) -> bool:
    """Reading them is common, and harmless."""
    outer = up(attributes)
    if isinstance(outer, ast.Subscript):
        return isinstance(outer.ctx, ast.Store)
    return isinstance(outer, ast.Attribute) and last_name(outer) in _CHANGING


def _may_be(program: Program, thing: ast.expr, owner: ast.ClassDef) -> bool:
    values = program.values(thing)
    classes = [one.of for one in values if isinstance(one, Instance)]
    return not values or any(
        owner in program.ancestry(one) or one in program.ancestry(owner) for one in classes
    )
