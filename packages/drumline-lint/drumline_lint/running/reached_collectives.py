"""The collectives that a call comes to with what it gives: conditions on parameters are asked for this one call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import inside, last_name, up
from drumline_lint.program.value import RankTest
from drumline_lint.running.collectives import (
    collective,
    collectives_of,
    has_group,
    likely_names,
)
from drumline_lint.running.conditions import conditions, rank_tests, taken_apart
from drumline_lint.running.given import Entered, is_on_parameter, truth

MOST_CALLS = 60
DEEPEST = 6
Chain = tuple[ast.Call, ...]


def reached_in(program: Program, node: ast.AST, tests: Sequence[RankTest]) -> Iterator[tuple[str, Chain]]:
    """As `collectives_in`, for those ranks of which the tests hold; those that are perhaps not reached are left out."""
    likely = likely_names(program)
    for call in inside(node, ast.Call):
        if last_name(call.func) in likely:
            yield from reached_by(program, call, tests)


def reached_by(program: Program, call: ast.Call, tests: Sequence[RankTest]) -> list[tuple[str, Chain]]:
    """What one call is or comes to, the first of each name, with the calls that lead there."""
    found: dict[str, Chain] = {}
    for name, chain in _Walk(program).through(call, Entered(None, call, None, tuple(tests))):
        found.setdefault(name, chain)
    return list(found.items())


class _Walk:
    """From one call into the functions that are run by it; each is looked into for what it was given."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.num_looked = 0

    def through(self, call: ast.Call, place: Entered) -> Iterator[tuple[str, Chain]]:
        """`place`: the function that the call is in."""
        self.num_looked += 1
        if name := collective(self.program, call):
            yield name, (call,)
            return
        if self.num_looked > MOST_CALLS or place.depth > DEEPEST or has_group(self.program, call):
            return
        function = self.program.function_of(call)
        if function is None or place.is_within(function) or not collectives_of(self.program, function):
            return
        inner = Entered(function, call, place, place.tests)
        likely = likely_names(self.program)
        for one in inside(function, ast.Call):
            if last_name(one.func) in likely and _is_come_to(self.program, one, inner):
                yield from ((name, (call, *chain)) for name, chain in self.through(one, inner))


def _is_come_to(program: Program, node: ast.AST, place: Entered) -> bool:
    """Whether nothing keeps one from a place of a function that was entered; a parameter might, if it is not known."""
    held = program.remember(("held at", node), lambda: list(conditions(program, node)))
    return all(
        _may_be(program, part, part_holds, place)
        for test, holds in held
        if not _is_likely(test, holds) or truth(program, test, place) is not None
        for part, part_holds in taken_apart(test, holds)
    )


def _may_be(program: Program, test: ast.expr, holds: bool, place: Entered) -> bool:
    said = truth(program, test, place)
    if said is not None:
        return said == holds
    is_always = is_about_being_distributed(test) and not rank_tests(program, test)
    return is_always or not is_on_parameter(program, test, place)


def _is_likely(test: ast.expr, holds: bool) -> bool:
    """In code that is right: a loop's condition, and what comes after `if bad: raise`."""
    statement = up(test)
    left = [] if not isinstance(statement, ast.If) else statement.orelse if holds else statement.body
    return isinstance(statement, ast.While) or (bool(left) and isinstance(left[-1], ast.Raise))
