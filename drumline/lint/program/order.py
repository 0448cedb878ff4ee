"""What a program does first: its calls in the order in which they would be made, functions looked into."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.program import Program
from drumline.lint.program.tree import FUNCTIONS, FunctionNode, function_around
from drumline.lint.reading.source import Source

DEEPEST = 12
MOST = 4000


def runs(program: Program, source: Source) -> list[list[ast.Call]]:
    """Of a file: what it does when it is run, or if that is little, what each function does that nobody calls."""
    started = list(_limited(_made_by(program, source.tree, ())))
    inside_functions = {function_around(call) for call in started}
    entries = [
        function
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for function in program.index(source).every(kind)
        if function not in inside_functions and not program.callers(function)
    ]
    found = [started, *(list(_limited(_made_by(program, function, ()))) for function in entries)]
    return [run for run in found if run]


def _made_by(program: Program, node: ast.AST, within: tuple[ast.AST, ...]) -> Iterator[ast.Call]:
    """A statement after the other, arguments before the call that they are for, both branches of an `if`."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and within[-1:] != (node,) and within:
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        yield from _made_by(program, child, within or (node,))
    if isinstance(node, ast.Call):
        yield node
        for function in _begun(program, node):
            if function not in within and len(within) < DEEPEST:
                for child in ast.iter_child_nodes(function):
                    yield from _made_by(program, child, (*within, function))


def _begun(program: Program, call: ast.Call) -> list[FunctionNode]:
    function = program.function_of(call)
    return [function] if function is not None else program.started(call)


def _limited(calls: Iterator[ast.Call]) -> Iterator[ast.Call]:
    for number, call in enumerate(calls):
        if number >= MOST:
            return
        yield call
