"""What a piece of code does, in order: its calls, imports, `with`s and `yield`s, and nothing else.

Without recursion: a sum of a thousand terms is a thousand deep.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias

from drumline_lint.program.tree import children

Doing: TypeAlias = ast.Call | ast.Import | ast.ImportFrom | ast.With | ast.AsyncWith | ast.Yield
_AS_THEY_ARE = (ast.Import, ast.ImportFrom, ast.With, ast.AsyncWith)
_AFTER_THEIR_PARTS = (ast.Call, ast.Yield)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def doings(nodes: Sequence[ast.AST]) -> list[Doing]:
    """A statement after the other, arguments before the call that they are for, both branches of an `if`.

    The body of a `with` is left to whoever knows what its context manager does.
    """
    found: list[Doing] = []
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in reversed(nodes)]
    while stack:
        node, are_parts_done = stack.pop()
        if are_parts_done or isinstance(node, _AS_THEY_ARE):
            assert isinstance(node, (*_AS_THEY_ARE, *_AFTER_THEIR_PARTS))
            found.append(node)
            continue
        if isinstance(node, _AFTER_THEIR_PARTS):
            stack.append((node, True))
        stack += [(part, False) for part in reversed(_parts(node))]
    return found


def _parts(node: ast.AST) -> list[ast.AST]:
    """In the order in which they are evaluated; of a function that is defined here, what is evaluated here."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.decorator_list, node.args]
    if isinstance(node, ast.Lambda):
        return []
    parts = children(node)
    if isinstance(node, _COMPREHENSIONS):
        parts.sort(key=lambda part: not isinstance(part, ast.comprehension))
    return parts
