"""What may be several things is taken for the same one in every run, whatever order a set has in
it."""

from __future__ import annotations

import ast
from pathlib import Path

from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

MANY = 12


def read(lines: list[str]) -> tuple[Program, dict[str, list[ast.Call]]]:
    text = "\n".join(lines)
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    return program, program.index(source).calls


def test_of_several_names_of_libraries_the_last_by_the_alphabet() -> None:
    choices = [f"if backend == {n}:\n    autocast = torch.amp{n:02}.autocast" for n in range(MANY)]
    program, calls = read(["import torch", *choices, "autocast()"])
    assert program.name_of(calls["autocast"][0].func) == f"torch.amp{MANY - 1}.autocast"


def test_of_several_functions_the_first_in_the_text() -> None:
    functions = [f"def start{n}(): ..." for n in range(MANY)]
    choices = [f"if backend == {n}:\n    start = start{n}" for n in reversed(range(MANY))]
    program, calls = read([*functions, *choices, "start()"])
    function = program.function_of(calls["start"][0])
    assert isinstance(function, ast.FunctionDef)
    assert function.name == "start0"
