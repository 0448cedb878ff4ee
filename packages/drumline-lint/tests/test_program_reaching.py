"""Which assignments may be the last before a use: in branches, loops, `try`, `with`, and within one
line."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from drumline_lint.program.program import Program
from drumline_lint.program.tree import nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source


def seen(text: str) -> set[object]:
    """The constants that the argument of `use(...)` may be."""
    source = Source(Path("a.py"), textwrap.dedent(text), ast.parse(textwrap.dedent(text)))
    program = Program([source])
    program.index(source)
    (use,) = (
        call
        for call in nodes_in(source.tree, ast.Call, into_functions=True)
        if isinstance(call.func, ast.Name) and call.func.id == "use"
    )
    return {
        value.value for value in program.values(use.args[0]) if isinstance(value, ConstantValue)
    }


CASES = {
    "the last one": ("x = 1\nx = 2\nuse(x)\nx = 3", {2}),
    "in its own assignment, the one before": ("x = 1\nx = use(x)", {1}),
    "an if may not be entered": ("x = 1\nif c:\n    x = 2\nuse(x)", {1, 2}),
    "elif without else": ("x = 0\nif c:\n    x = 1\nelif d:\n    x = 2\nuse(x)", {0, 1, 2}),
    "within a branch": ("x = 0\nif c:\n    x = 1\n    use(x)\nelse:\n    x = 2", {1}),
    "within the else": ("x = 0\nif c:\n    x = 1\nelse:\n    use(x)", {0}),
    "a branch that raises does not come here": (
        "x = 0\nif c:\n    x = 1\n    raise E\nuse(x)",
        {0},
    ),
    "a loop may not be entered": ("x = 0\nfor i in y:\n    x = 1\nuse(x)", {0, 1}),
    "later in a loop, the round before": ("x = 0\nwhile c:\n    use(x)\n    x = 1", {0, 1}),
    "earlier in the same round": ("x = 0\nwhile c:\n    x = 1\n    use(x)\n    x = 2", {1}),
    "of an outer loop": ("x = 0\nfor i in y:\n    for j in i:\n        use(x)\n    x = 1", {0, 1}),
    "a loop's else": ("x = 0\nfor i in y:\n    pass\nelse:\n    x = 1\n    use(x)", {1}),
    "a try may have got anywhere": (
        "x = 0\ntry:\n    x = 1\n    x = 2\nexcept E:\n    use(x)",
        {0, 1, 2},
    ),
    "after a try whose handler does not": (
        "x = 0\ntry:\n    x = 1\nexcept E:\n    pass\nuse(x)",
        {0, 1},
    ),
    "in a finally": (
        "x = 0\ntry:\n    x = 1\nexcept E:\n    x = 2\nfinally:\n    use(x)",
        {0, 1, 2},
    ),
    "a with binds for its body": ("x = 0\nwith a as x:\n    use(x)", set()),
    "a with's own item is read before": ("x = 0\nwith use(x) as x:\n    pass", {0}),
    "a walrus later in the line": ("x = 0\nf(use(x), (x := 1))", {0}),
    "an augmented one is not known": ("x = 0\nx += 1\nuse(x)", set()),
    "an augmented one in a loop keeps the first": ("x = 0\nfor i in y:\n    x += 1\nuse(x)", {0}),
    "a comprehension's name is its own": ("x = 0\nz = [use(x) for x in (1, 2)]", {1, 2}),
    "and is gone after it": ("x = 0\nz = [x for x in (1, 2)]\nuse(x)", {0}),
    "and its first iterable is read outside": ("x = 0\nz = [x for x in use(x)]", {0}),
    "after a match": ("x = 0\nmatch y:\n    case 1:\n        x = 1\nuse(x)", {0, 1}),
    "unpacked": ("x, y = 1, 2\nx, y = y, 3\nuse(x)", {2}),
    "a parameter that is bound again": ("def f(x=1):\n    x = 2\n    use(x)", {2}),
    "a parameter that may be bound again": (
        "def f(x=1):\n    if c:\n        x = 2\n    use(x)",
        {1, 2},
    ),
    "another function binds it, at some time": (
        "x = 0\nx = 1\ndef f():\n    global x\n    x = 2\nuse(x)",
        {1, 2},
    ),
    "a decorator is outside": ("x = 1\nx = 2\n@use(x)\ndef f():\n    x = 3", {2}),
}


@pytest.mark.parametrize("title", CASES)
def test_which_may_be_the_last(title: str) -> None:
    text, expected = CASES[title]
    assert seen(text) == expected


def test_a_chain_of_a_thousand_elifs() -> None:
    chain = "".join(f"elif c == {n}:\n    x = {n}\n" for n in range(1, 900))
    try:
        found = seen(f"x = -1\nif c == 0:\n    x = 0\n{chain}else:\n    x = 1\nuse(x)")
    except RecursionError:  # of Python's own parser
        pytest.skip("this Python cannot parse it")
    assert found == set(range(-1, 900))
