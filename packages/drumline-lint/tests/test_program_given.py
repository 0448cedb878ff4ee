"""What callers give for parameters, what an option is by its name, and which package a module is
in."""

from __future__ import annotations

import ast

import pytest

from drumline_lint.program.files import package_of
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank, RankTest
from test_program_values import program_of, values_in

ARGUMENTS = "import argparse, os\nargs = argparse.ArgumentParser().parse_args()\n"


def given(text: str) -> list[str | None]:
    """For the parameter `wanted` of the first function."""
    program: Program = program_of({"main": text})
    parameters = program.index(program.sources[0]).every(ast.arg)
    parameter = next(one for one in parameters if one.arg == "wanted")
    return [None if one is None else ast.unparse(one) for one in program.arguments_for(parameter)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, wanted): pass\nf(1, 2)\nf(1, wanted=3)", ["2", "3"]),
        ("def f(wanted=5): pass\nf()", ["5"]),
        ("def f(*, wanted=5): pass\nf(wanted=x)", ["x"]),
        ("def f(wanted): pass", [None]),
        ("def f(wanted): pass\nf(*every)", [None]),
        ("def f(wanted, a): pass\nf(x, *every)", ["x"]),
        ("def f(a, wanted=5): pass\nf(1, **every)\nf(1, wanted=x, **every)", [None, "x"]),
        ("class A:\n    def f(self, wanted): pass\nA().f(4)", ["4"]),
        ("class A:\n    @staticmethod\n    def f(wanted): pass\nA().f(4)", ["4"]),
        ("import torch.multiprocessing as mp\ndef f(wanted): pass\nmp.spawn(f, nprocs=2)", [None]),
    ],
)
def test_what_callers_give(text: str, expected: list[str | None]) -> None:
    assert given(text) == expected


def test_an_option_is_a_rank_by_its_name() -> None:
    assert values_in(ARGUMENTS + "ask(args.local_rank)") == {Rank("local")}
    assert values_in(ARGUMENTS + "ask(args.rank == 0)") == {RankTest("global", True)}


def test_an_option_that_is_set_is_what_it_is_set_to() -> None:
    text = ARGUMENTS + "args.rank = int(os.environ['LOCAL_RANK'])\nask(args.rank)"
    assert Rank("global") not in values_in(text)
    assert Rank("local") in values_in(text)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("a.b.c", "a.b"),
        ("a", ""),
        (".b", "."),
        ("..b", ".."),
        ("..a.b", "..a"),
        ("..", ""),
        ("", ""),
    ],
)
def test_package(name: str, package: str) -> None:
    assert package_of(name) == package
