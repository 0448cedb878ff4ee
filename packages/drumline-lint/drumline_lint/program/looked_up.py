"""Functions that are called by a name which is put together: `getattr(module, f"init_{launcher}")()`."""

from __future__ import annotations

import ast

from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, class_around
from drumline_lint.program.value import Module


def is_looked_up(program: Program, function: FunctionNode | None) -> bool:
    """Whether some file asks its module for a name that begins like its own."""
    if not isinstance(function, ast.FunctionDef) or class_around(function) is not None:
        return False
    home = Module(program.source_of(function))
    return any(
        function.name.startswith(beginning) and home in program.values(module)
        for module, beginning in program.remember("looked up", lambda: _find(program))
    )


def _find(program: Program) -> list[tuple[ast.expr, str]]:
    """What is asked, and how the names begin; nothing where they may begin with anything."""
    asked = [
        (call.args[0], _beginning(call.args[1]))
        for source in program.sources
        if "getattr" in source.text
        for call in program.index(source).calls.get("getattr", ())
        if len(call.args) >= 2
    ]
    return [(module, beginning) for module, beginning in asked if beginning]


def _beginning(name: ast.expr) -> str:
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Mod | ast.Add):
        name = name.left
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    text = name.value if isinstance(name, ast.Constant) else ""
    return text.partition("%")[0] if isinstance(text, str) else ""
