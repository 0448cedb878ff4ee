"""Who calls an instance of a class, itself or in its wrapper, and so runs its `forward` or `__call__`."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument
from drumline_lint.program.classes import called_as
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, class_around, names_assigned
from drumline_lint.program.value import Instance, Made

# By these names they are handed on to others.
_USUAL = ("model", "net", "network", "module")


def calls_of_instances(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.Call]:
    """Those that are found by the name that one was given; there may be others, so never take them for all."""
    owner = class_around(function)
    if owner is None or function.name not in ("forward", "__call__"):
        return []
    return [
        call
        for name in _names(program, owner)
        for source in program.files.calling.get(name, ())
        for call in program.index(source).calls.get(name, ())
        if function in _run_by(program, call.func)
    ]


def _names(program: Program, owner: ast.ClassDef) -> dict[str, None]:
    """By which instances may be called: what they, or all that is wrapped, are assigned to."""
    made = [
        call
        for source in program.files.calling.get(owner.name, ())
        for call in program.index(source).calls.get(owner.name, ())
    ]
    every = [*made, *program.all_calls(DDP, *FSDP)]
    return dict.fromkeys([*_USUAL, *(name for call in every for name in names_assigned(call))])


def _run_by(program: Program, callee: ast.expr) -> list[FunctionNode | None]:
    values = program.values(callee)
    wrapped = [
        argument(one.call, 0, "module")
        for one in values
        if isinstance(one, Made) and one.name in (DDP, *FSDP)
    ]
    inner = [value for model in wrapped for value in program.values(model)]
    models = [value.of for value in (*values, *inner) if isinstance(value, Instance)]
    return [program.method(one, called_as(program, one)) for one in models]
