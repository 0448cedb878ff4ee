"""Where a model is known not to be wrapped: in the `else` of `isinstance(model, DDP)` or `hasattr(model, "module")`."""

from __future__ import annotations

import ast

from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, dotted, inside, position
from drumline_lint.program.value import Known, Library, Several, Value
from drumline_lint.running.alone import says_distributed
from drumline_lint.running.conditions import known_parts

_MODULE = "module"


def is_unwrapped(program: Program, model: ast.expr) -> bool:
    """Whether a condition on the model, or on there being several processes, says so at this place."""
    known = known_parts(program, model)
    return any(_says_unwrapped(program, test, holds, model) for test, holds in known) or _is_instead(model)


def _says_unwrapped(program: Program, test: ast.expr, holds: bool, model: ast.expr) -> bool:
    if not isinstance(test, ast.BoolOp) and says_distributed(program, test) is (not holds):
        return True
    asked = _asked_for_wrapper(program, test)
    return asked is not None and not holds and _is_same(program, asked, model)


def _asked_for_wrapper(program: Program, test: ast.expr) -> ast.expr | None:
    """What is asked about by `isinstance(model, DDP)`, `hasattr(model, "module")` and `type(model) is DDP`."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.Eq | ast.In):
        asking, kind = test.left, test.comparators[0]
        if not isinstance(asking, ast.Call) or program.name_of(asking.func) != "type" or not asking.args:
            return None
        return asking.args[0] if _has_wrapper(program, kind) else None
    if not isinstance(test, ast.Call) or len(test.args) != 2:
        return None
    name, (asked, kind) = program.name_of(test.func), test.args
    if name == "hasattr":
        return asked if Known(_MODULE) in program.values(kind) else None
    return asked if name == "isinstance" and _has_wrapper(program, kind) else None


def _has_wrapper(program: Program, kind: ast.expr) -> bool:
    """Whether DDP is the class, or one of those, that is asked for."""
    return any(_is_wrapper(program, value) for value in program.values(kind))


def _is_wrapper(program: Program, value: Value) -> bool:
    if isinstance(value, Several):
        return any(_has_wrapper(program, one) for one in value.items)
    return value == Library(DDP)


def _is_same(program: Program, asked: ast.expr, model: ast.expr) -> bool:
    """Whether nothing else was put under that name since it was asked."""
    if not dotted(asked) or dotted(asked) != dotted(model):
        return False
    if isinstance(asked, ast.Name) and isinstance(model, ast.Name):
        return program.bindings(asked) == program.bindings(model)
    assert isinstance(model, ast.Attribute)
    set_to = program.index(program.source_of(model)).attributes.get(model.attr, ())
    places = [position(target) for target, _ in set_to if dotted(target) == dotted(model)]
    return not any(position(asked) < place < position(model) for place in places)


def _is_instead(model: ast.expr) -> bool:
    """`try: model.module.state_dict()`, and in its `except` there is no such thing."""
    inner: ast.AST = model
    for outer in above(model):
        if isinstance(outer, ast.Try) and isinstance(inner, ast.ExceptHandler):
            tried = [one for part in outer.body for one in inside(part, ast.Attribute)]
            if any(one.attr == _MODULE and dotted(one.value) == dotted(model) for one in tried):
                return True
        inner = outer
    return False
