"""What comes of taking values apart: by unpacking them, and by a loop over them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from drumline_lint.program.tree import Binding, last_name
from drumline_lint.program.value import NOTHING, Element, Several, Value, Values
from drumline_lint.program.whole import Whole

# They give on what their first argument has, one by one.
_GIVING_ON = {"enumerate", "tqdm", "trange", "zip", "iter", "islice", "track", "cycle", "reversed"}


def any_of(program: Whole, expressions: Iterable[ast.expr | None]) -> Values:
    """All that one of these may be."""
    return frozenset().union(*map(program.values, expressions))


def unpacked(program: Whole, values: Values, path: tuple[int, ...]) -> Values:
    """The part of a value that a name gets: by (1, 0) `c` of `a, (c, d) = value`."""
    for number in path:
        inner: set[Value] = set()
        for value in values:
            if isinstance(value, Several) and number < len(value.items):
                inner |= program.values(value.items[number])
            elif isinstance(value, Element):
                inner.add(value)
        values = frozenset(inner)
    return values


def each(program: Whole, binding: Binding) -> Values:
    """What a loop's name may be."""
    assert binding.value is not None
    found: set[Value] = set()
    for value in program.values(binding.value):
        if isinstance(value, Several):
            found.update(*map(program.values, value.items))
    if not found:
        callee = last_name(getattr(binding.value, "func", binding.value))
        if callee == "enumerate" and binding.path[:1] == (0,):
            return NOTHING
        found.add(Element(iterated(binding.value)))
    return frozenset(found)


def iterated(expression: ast.expr) -> ast.expr:
    """What is behind `enumerate(...)`, `tqdm(...)`, `zip(...)`: their first argument, or the first loader in it."""
    while isinstance(expression, ast.Call) and expression.args:
        if last_name(expression.func) not in _GIVING_ON:
            break
        expression = expression.args[0]
    return expression
