"""Questions about functions that lead back to themselves where functions call each other in a ring."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from drumline.lint.program.program import Program

Found = TypeVar("Found")
NOT_CUT = 1_000_000


@dataclass
class _Asked:
    """What is known of one question, and which nodes it is being asked of."""

    known: dict[ast.AST, Any] = field(default_factory=dict)
    for_now: dict[ast.AST, Any] = field(default_factory=dict)
    depths: dict[ast.AST, int] = field(default_factory=dict)
    cut: int = NOT_CUT


def once(
    program: Program, question: str, node: ast.AST, find: Callable[[], Found], meanwhile: Found
) -> Found:
    """What was found before; whoever asks while it is being looked for gets something to go on with.

    What was found with such an answer in it is kept until the question that was asked first is answered.
    """
    asked = program.remember(("asked", question), _Asked)
    if node in asked.known:
        return cast(Found, asked.known[node])
    if node in asked.for_now or node in asked.depths:
        asked.cut = min(asked.cut, asked.depths.get(node, 0))
        return cast(Found, asked.for_now.get(node, meanwhile))
    depth = asked.depths[node] = len(asked.depths)
    try:
        found = find()
    finally:
        del asked.depths[node]
    is_whole = asked.cut >= depth
    (asked.known if is_whole else asked.for_now)[node] = found
    if is_whole:
        asked.cut = NOT_CUT
    if depth == 0:
        asked.for_now.clear()
    return found
