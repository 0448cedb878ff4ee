"""What `not`, `and` and `or` come to, where it is known of their parts, or of some of them."""

from __future__ import annotations

import ast
from collections.abc import Callable


def is_joined(test: ast.expr) -> bool:
    """Whether it is made of other conditions."""
    return isinstance(test, ast.BoolOp) or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))


def decided(test: ast.expr, said: Callable[[ast.expr], bool | None]) -> bool | None:
    """What it comes to by what is said of its parts; None where that is not known."""
    if isinstance(test, ast.UnaryOp):
        inner = said(test.operand)
        return None if inner is None else not inner
    parts = {said(one) for one in test.values} if isinstance(test, ast.BoolOp) else {None}
    deciding = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)
    return deciding if deciding in parts else None if None in parts else not deciding
