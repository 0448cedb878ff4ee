"""What something is made of: all that stands in what is written for it, and in the functions and classes it calls.

`origins` goes back to where a value was written; this goes into it, down to the code that makes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.origins import behind, written
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_world_size
from drumline_lint.program.tree import children
from drumline_lint.program.value import Class, Function, Rank

DEEPEST = 12
LARGEST = 4000
"""So many nodes are looked at for one answer; generated code is not worth more."""


def made_of(program: Program, expression: ast.expr | None, *, only_making: bool = False) -> Iterator[ast.AST]:
    """All that it is made of: what is written, its arguments, and the bodies of the functions and classes it calls.

    `only_making`: of a class, what is done when it is made, and not what its other methods do later.
    """
    pending: list[tuple[ast.AST, int]] = [(one, 0) for one in written(program, expression)]
    seen: set[ast.AST] = set()
    while pending and len(seen) < LARGEST:
        node, depth = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if depth > DEEPEST:
            continue
        for child in children(node):
            if not (only_making and _is_for_later(node, child)):
                pending.append((child, depth))
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            pending += [(one, depth + 1) for one in behind(program, node) if one is not None]
        if isinstance(node, ast.Call):
            pending += [(one, depth + 1) for one in bodies(program, node)]


def _is_for_later(owner: ast.AST, part: ast.AST) -> bool:
    is_method = isinstance(owner, ast.ClassDef) and isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_method and getattr(part, "name", "") not in ("__init__", "__new__", "__post_init__", "setup")


def bodies(program: Program, call: ast.Call) -> list[ast.AST]:
    """The functions and classes of the given files that a call goes into."""
    values = program.values(call.func)
    return [value.node for value in values if isinstance(value, Function | Class)]


def depends_on_rank(program: Program, expression: ast.expr | None) -> bool:
    """Whether a rank, or how many there are, is anywhere in what it is made of."""
    return any(is_rank_or_count(program, node) for node in made_of(program, expression))


def is_rank_or_count(program: Program, node: ast.AST) -> bool:
    """`rank`, `dist.get_rank()`, `world_size`."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
        return False
    return is_world_size(node) or any(isinstance(value, Rank) for value in program.values(node))
