"""What conditions in a function come to for one call of it, and which collectives that call comes
to."""

from __future__ import annotations

import ast

import pytest

from drumline_lint.flow.call_values import CallFrame, truth
from drumline_lint.flow.collectives import reached_by
from drumline_lint.program.value import RankTest
from test_program_values import program_of

FIRST = RankTest("global", True)
OTHERS = RankTest("global", False)
HEAD = "import functools, os, torch\nimport torch.distributed as dist\nRANK = int(os.environ['RANK'])\n"


def said(parameters: str, test: str, given: str, *tests: RankTest) -> bool | None:
    """Of a test in a function, for one call of it."""
    text = f"{HEAD}def f({parameters}):\n    if {test}: pass\nf({given})\nf(3)\n"
    program = program_of({"main": text})
    index = program.index(program.sources[0])
    function = index.every(ast.FunctionDef)[0]
    call = index.calls["f"][0]
    outer = CallFrame(None, call, None, tests)
    return truth(program, index.every(ast.If)[0].test, CallFrame(function, call, outer, tests))


@pytest.mark.parametrize(
    ("parameters", "test", "given", "expected"),
    [
        ("rank", "rank == 0", "-1", False),
        ("rank", "rank in (-1, 0)", "rank=-1", True),
        ("rank=-1", "rank not in [-1, 0]", "", False),
        ("rank=-1", "rank not in [-1, 0]", "5", True),
        ("rank=-1", "rank not in others", "5", None),
        ("rank=-1", "rank == 0", "**more", None),
        ("rank=-1", "rank == 0", "something", None),
        ("a, *, b=False", "a and b", "1", False),
        ("a, *, b=False", "a or b", "1", True),
        ("a, *, b=False", "not b", "unknown", True),
        ("a, *, b=False", "a or b", "unknown", None),
        ("a=None", "a is None", "", True),
        ("a=None", "a is not None", "torch.ones(2)", True),
        ("a=None", "a is not None", "os.environ.get('A')", None),
        ("a=None", "a > 3", "", None),
        ("a", "1 < a < 3", "2", None),
    ],
)
def test_what_a_call_gives_decides(
    parameters: str, test: str, given: str, expected: bool | None
) -> None:
    assert said(parameters, test, given) is expected


@pytest.mark.parametrize(
    ("test", "who", "expected"),
    [
        ("rank == 0", FIRST, True),
        ("rank == 0", OTHERS, False),
        ("rank not in [-1, 0]", OTHERS, True),
        ("rank == 1", OTHERS, None),
        ("rank == 3", OTHERS, None),
        ("3 != rank", OTHERS, None),
        ("rank < 3", OTHERS, None),
        ("rank > 5", OTHERS, None),
        ("rank in (0, 3)", OTHERS, None),
        ("rank > 0", OTHERS, True),
        ("rank >= 1", OTHERS, True),
        ("rank < 1", OTHERS, False),
        ("0 == rank", OTHERS, False),
        ("rank", OTHERS, True),
        ("rank == 0", RankTest("global", None), None),
    ],
)
def test_who_makes_the_call_decides(test: str, who: RankTest, expected: bool | None) -> None:
    assert said("rank", test, "RANK", who) is expected


def chains(text: str) -> list[list[str]]:
    """The collectives that the last call of `go` comes to on rank 0."""
    program = program_of({"main": HEAD + text})
    call = program.index(program.sources[0]).calls["go"][-1]
    return [
        [ast.unparse(one.func) for one in chain] for _, chain in reached_by(program, call, [FIRST])
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def go(): dist.barrier()\ngo()", [["go", "dist.barrier"]]),
        ("def go(a):\n    if a: dist.barrier()\ngo(0)", []),
        ("def go(a):\n    if a: dist.barrier()\ngo(unknown)", []),
        ("def go(a):\n    if a.flag: dist.barrier()\ngo(unknown)", [["go", "dist.barrier"]]),
        (
            "def go(a):\n    if a: raise ValueError\n    dist.barrier()\ngo(x)",
            [["go", "dist.barrier"]],
        ),
        ("def go(a):\n    if a: return\n    dist.barrier()\ngo(x)", []),
        ("def go(a):\n    if not (b or not a): dist.barrier()\ngo(1)", [["go", "dist.barrier"]]),
        ("def go(a):\n    if not (b or a): dist.barrier()\ngo(1)", []),
        ("def go():\n    b = not b\n    if b: dist.barrier()\ngo()", [["go", "dist.barrier"]]),
        (
            "def go():\n    b = not c\n    c = not b\n    if b: dist.barrier()\ngo()",
            [["go", "dist.barrier"]],
        ),
        ("def go(a):\n    while a: dist.barrier()\ngo(x)", [["go", "dist.barrier"]]),
        ("def go(a):\n    if a: a = x\n    if a: dist.barrier()\ngo(0)", []),
        ("def go(n):\n    if n: go(n - 1)\n    dist.barrier()\ngo(3)", [["go", "dist.barrier"]]),
        (
            "def on(b):\n    if b: dist.barrier()\ndef go(a): on(a)\ngo(1)",
            [["go", "on", "dist.barrier"]],
        ),
        ("def on(b):\n    if b: dist.barrier()\ndef go(a): on(a)\ngo(0)", []),
    ],
)
def test_what_a_call_comes_to(text: str, expected: list[list[str]]) -> None:
    assert chains(text) == expected
