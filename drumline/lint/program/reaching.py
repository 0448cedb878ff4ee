"""Which bindings of a name may have been the last before a use: after `model = DDP(model)` it is the wrapped one."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from drumline.lint.program.tree import LOOPS, SCOPES, Binding, above, end_position, position, statement_of


def reaching(bindings: Sequence[Binding], use: ast.AST) -> list[Binding]:
    """Those before the use, back to the first that was made in any case; in a loop also those after it."""
    if len(bindings) == 1:
        return list(bindings)
    around = {use, *above(use)}
    before = sorted(
        (one for one in bindings if _is_before(one, use, around)), key=lambda one: position(one.node)
    )
    found: list[Binding] = []
    for binding in reversed(before):
        found.append(binding)
        if _is_certain(binding, around):
            last = binding
            break
    else:
        last = None
    loops = [node for node in around if isinstance(node, LOOPS)]
    for binding in bindings:
        comes_around = any(
            _is_in(binding.node, loop) and not (last and _is_in(last.node, loop)) for loop in loops
        )
        if comes_around and binding not in found:
            found.append(binding)
    return found or list(bindings)


def _is_before(binding: Binding, use: ast.AST, around: set[ast.AST]) -> bool:
    if isinstance(binding.node, ast.arg):
        return True
    if binding.node in around:  # the loop or `with` whose body it is in binds its name; an assignment not yet
        return binding.kind in ("each", "entered") and not _is_in(use, binding.value)
    return end_position(binding.node) <= position(use) or position(binding.node) < position(use)


def _is_certain(binding: Binding, around: set[ast.AST]) -> bool:
    """Whether whoever comes to the use has passed the binding."""
    if isinstance(binding.node, ast.arg) or binding.node in around:
        return True
    statement = statement_of(binding.node)
    block = getattr(statement, "_up", None)
    if not isinstance(block, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
        return False
    if isinstance(block, SCOPES):
        return block in around
    return block in around and any(_in_same_list(block, statement, other) for other in around)


def _in_same_list(block: ast.AST, one: ast.AST, other: ast.AST) -> bool:
    """Of an `if`, both in its body or both in its `else`."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        statements = getattr(block, name, [])
        if isinstance(statements, list) and one in statements:
            return other in statements
    return False


def _is_in(node: ast.AST, outer: ast.AST | None) -> bool:
    return outer is not None and (node is outer or any(one is outer for one in above(node)))
