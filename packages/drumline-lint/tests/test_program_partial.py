"""Functions that `functools.partial` has given some of their arguments: who calls them, and with what."""

from __future__ import annotations

import ast

import pytest

from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue, Rank
from test_program_values import program_of, values_in

BEFORE = """
import os
import threading
import functools
import torch.multiprocessing as mp
from functools import partial
rank = int(os.environ["RANK"])
"""
CALLED = {
    "assigned": "run = partial(train, 1)\nrun()",
    "by the module's name": "run = functools.partial(train, 1)\nrun()",
    "by a name of one's own": "from functools import partial as p\nrun = p(train, 1)\nrun()",
    "by a name that it is given": "p = functools.partial\nrun = p(train, 1)\nrun()",
    "at once": "partial(train, 1)()",
    "twice": "half = partial(train, 1)\nrun = partial(half, b=2)\nrun()",
    "in a loop's way": "run = partial(train, a=1)\nfor x in many:\n    run(b=x)",
    "an attribute": "class T:\n    def __init__(self):\n        self.run = partial(train, 1)\n"
    "    def go(self):\n        self.run(2)",
    "of a class": "class T:\n    run = partial(train, 1)\nT().run(2)",
    "spawned": "mp.spawn(partial(train, b=1), nprocs=2)",
    "spawned by a name": "run = partial(train, b=1)\nmp.spawn(run, nprocs=2)",
    "in a thread": "threading.Thread(target=partial(train, 1)).start()",
    "one or the other": "run = partial(train, 1) if rank else partial(train, 2)\nrun()",
}


def of_train(text: str) -> tuple[Program, ast.FunctionDef]:
    program = program_of({"main": f"{BEFORE}def train(a, b=0):\n    pass\n{text}\n"})
    every = program.index(program.sources[0]).every(ast.FunctionDef)
    return program, next(one for one in every if one.name == "train")


@pytest.mark.parametrize("text", CALLED.values(), ids=CALLED)
def test_who_calls_it_is_found(text: str) -> None:
    program, train = of_train(text)
    assert len(program.callers(train)) == 1
    (call,) = program.callers(train)
    assert program.function_of(call) is train or program.started_functions(call)[0] is train


@pytest.mark.parametrize(
    "text", ["run = partial(train, 1)", "use(partial(train, 1))", "run = partial(other, train)\nrun()"]
)
def test_what_is_only_made_is_not_called(text: str) -> None:
    program, train = of_train(text)
    assert program.callers(train) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(wanted):\n    ask(wanted)\npartial(f, 3)()", {3}),
        ("def f(a, wanted):\n    ask(wanted)\nrun = partial(f, 3)\nrun(4)", {4}),
        ("def f(a, wanted):\n    ask(wanted)\nrun = partial(f, wanted=3)\nrun(4)", {3}),
        ("def f(a, wanted=5):\n    ask(wanted)\nrun = partial(f, 3)\nrun()", {5}),
        ("def f(wanted):\n    ask(wanted)\nrun = partial(f, wanted=3)\nrun(wanted=4)", {4}),
        ("def f(a, b, wanted):\n    ask(wanted)\nrun = partial(partial(f, 1), 2)\nrun(4)", {4}),
        ("def f(wanted):\n    ask(wanted)\nrun = partial(f, 1) if x else partial(f, 2)\nrun()", {1, 2}),
        ("def f(wanted):\n    ask(wanted)\nf(1)\nrun = partial(f, 2)\nrun()", {1, 2}),
        ("def f(a, wanted):\n    ask(wanted)\nrun = partial(f, *every)\nrun(4)", set()),
        ("class A:\n    def f(self, wanted):\n        ask(wanted)\nrun = partial(A().f, 3)\nrun()", {3}),
        ("def f(a, wanted):\n    ask(wanted)\nmp.spawn(partial(f, wanted=3), nprocs=2)", {3}),
        ("def f(b, a, wanted):\n    ask(wanted)\nmp.spawn(partial(f, 3), args=(4,), nprocs=2)", {4}),
        ("def f(a, wanted):\n    ask(wanted)\nthreading.Thread(target=partial(f, 3), args=(4,)).start()", {4}),
        ("def f(wanted):\n    ask(wanted)\nthreading.Thread(target=partial(f, 3)).start()", {3}),
    ],
)
def test_what_parameters_get(text: str, expected: set[int]) -> None:
    assert values_in(BEFORE + text) == {ConstantValue(one) for one in expected}


def test_ranks_are_followed() -> None:
    assert values_in(BEFORE + "def f(x):\n    ask(x)\nrun = partial(f, x=rank)\nrun()") == {Rank("global")}
    spawned = "def f(b, x):\n    ask(x)\nmp.spawn(partial(f, 3), nprocs=2)"
    assert values_in(BEFORE + spawned) == {Rank("spawned")}


def test_what_comes_of_it_is_what_the_function_returns() -> None:
    assert values_in(BEFORE + "def f(x):\n    return 7\nrun = partial(f, 1)\nask(run())") == {ConstantValue(7)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, wanted): pass\nrun = partial(f, 1)\nrun(x)", ["x"]),
        ("def f(wanted, b): pass\nrun = partial(f, x)\nrun(1)", ["x"]),
        ("def f(a, wanted=5): pass\nrun = partial(f, 1)\nrun()", ["5"]),
        ("def f(a, wanted): pass\nmp.spawn(partial(f, wanted=x), nprocs=2)", ["x"]),
        ("def f(a, wanted): pass\nrun = partial(f, **more)\nrun(1)", [None]),
    ],
)
def test_what_is_written_for_parameters(text: str, expected: list[str | None]) -> None:
    program = program_of({"main": BEFORE + text})
    parameter = next(one for one in program.index(program.sources[0]).every(ast.arg) if one.arg == "wanted")
    given = program.arguments_for(parameter)
    assert [None if one is None else ast.unparse(one) for one in given] == expected
