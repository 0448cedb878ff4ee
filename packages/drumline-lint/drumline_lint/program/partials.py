"""Functions that got some of their arguments before they are called, by `functools.partial`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drumline_lint.program.library_calls import aliases, calls_by_word
from drumline_lint.program.tree import FunctionNode, names_assigned, up
from drumline_lint.program.value import Function, Values
from drumline_lint.program.whole import Whole
from drumline_lint.reading.source import Source

PARTIAL = "functools.partial"


def given_before(program: Whole, node: ast.Call) -> Values:
    """What a call of `partial` makes: the functions of the given files that it is given, with its arguments."""
    functions = [value for value in program.values(node.args[0]) if isinstance(value, Function)]
    return frozenset(replace(one, partials=(*one.partials, node)) for one in functions)


def bound_to(program: Whole, callee: ast.expr | None, function: FunctionNode) -> list[ast.Call]:
    """The arguments that a function has already, as a call of it with these; one for each thing that it may be."""
    values = program.values(callee)
    every = [value.partials for value in values if isinstance(value, Function) and value.node is function]
    return [_together(one) for one in dict.fromkeys(every)]


def as_called(program: Whole, call: ast.Call, function: FunctionNode) -> list[ast.Call]:
    """A call with the arguments that the function has from before; several if it may be one of several."""
    before = bound_to(program, call.func, function)
    return [_behind(one, call) if one.args or one.keywords else call for one in before] or [call]


def _together(partials: Sequence[ast.Call]) -> ast.Call:
    """Positions are filled from the first on; of names, the last one's are taken."""
    args = [one for partial in partials for one in partial.args[1:]]
    keywords = [one for partial in reversed(partials) for one in partial.keywords]
    return ast.Call(func=ast.Name("partial"), args=args, keywords=keywords)


def _behind(before: ast.Call, call: ast.Call) -> ast.Call:
    return ast.Call(
        func=call.func, args=[*before.args, *call.args], keywords=[*call.keywords, *before.keywords]
    )


def calls_through(program: Whole, function: FunctionNode, name: str) -> list[ast.Call]:
    """The calls that may be of a partial of a function: those by a name that one was assigned to, or made at once."""
    found: dict[ast.Call, None] = {}
    for partial in _partials_of(program, function, name):
        outer = up(partial)
        if isinstance(outer, ast.Call) and outer.func is partial:
            found[outer] = None
        else:
            for assigned in names_assigned(partial):
                found |= dict.fromkeys(_calls_named(program, assigned))
    return list(found)


def _partials_of(program: Whole, function: FunctionNode, name: str) -> Iterator[ast.Call]:
    by_word = program.remember("partials", lambda: calls_by_word(_all_partials(program)))
    for call in by_word.get(name, ()):
        if any(isinstance(one, Function) and one.node is function for one in program.values(call)):
            yield call


def _all_partials(program: Whole) -> Iterator[tuple[Source, list[ast.Call]]]:
    """By their names alone: what those stand for is asked of few."""
    for source in program.files.sources:
        if "partial" in source.text:
            calls = program.files.index(source).calls
            every = {"partial"} | aliases(program, source, ("partial", PARTIAL))
            yield source, [call for one in sorted(every) for call in calls.get(one, ())]


def _calls_named(program: Whole, name: str) -> Iterator[ast.Call]:
    for source in program.files.calling.get(name, ()):
        yield from program.files.index(source).calls.get(name, ())
