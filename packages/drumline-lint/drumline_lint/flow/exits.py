"""Exits of a process from what it does with the other ranks, and what those do meanwhile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

from drumline_lint.flow.conditions import ENDING_CALLS, rest_of_block
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    LOOPS,
    ancestors,
    enclosing_function,
    parent_of,
    position,
    statement_of,
)
from drumline_lint.reading.source import Source

Exit: TypeAlias = ast.Return | ast.Break | ast.Continue | ast.Expr


def exits(program: Program, source: Source) -> Iterator[Exit]:
    """Of a function, a loop or the process, in the order of the text."""
    index = program.index(source)
    every: list[Exit] = [
        *index.every(ast.Return),
        *index.every(ast.Break),
        *index.every(ast.Continue),
    ]
    for last in ("exit", "_exit", "quit"):
        for call in index.calls.get(last, ()):
            statement = parent_of(call)
            if program.name_of(call.func) in ENDING_CALLS and isinstance(statement, ast.Expr):
                every.append(statement)
    yield from sorted(every, key=position)


def what_others_do(program: Program, exit_: Exit) -> Iterator[ast.AST]:
    """The rest of the blocks around it, and the loops that continue; an exit of the process skips
    everything later."""
    inner: ast.stmt = exit_
    for outer in ancestors(exit_):
        yield from rest_of_block(inner)
        if isinstance(outer, LOOPS):
            if isinstance(exit_, ast.Continue):
                return
            yield from outer.body
            if isinstance(exit_, ast.Break):
                return
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(outer, ast.stmt):
            inner = outer
    function = enclosing_function(exit_)
    if isinstance(exit_, ast.Expr) and function is not None:
        for call in program.callers(function):
            yield from rest_of_block(statement_of(call))
