"""Places that a condition in their own function keeps from some ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline_lint.flow.conditions import conditions, held_conditions, rank_tests, rank_tests_at
from drumline_lint.flow.guards import guards_of_decorators
from drumline_lint.flow.loops import is_backward, makes
from drumline_lint.flow.single_process import says_distributed
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import Rank, RankTest
from drumline_lint.reading.source import Source


@dataclass(frozen=True, eq=False)
class RankFilter:
    """How ranks are excluded from a place."""

    tests: tuple[RankTest, ...]
    by_exit: bool
    """Whether they exited before."""
    region: tuple[ast.AST, ...]
    """What the other ranks run from then on."""


def calls_under_rank_tests(program: Program, source: Source) -> Iterator[ast.Call]:
    """The calls in functions with conditions on ranks; the others need no closer check."""
    scopes = _scopes_with_rank_tests(program, source)
    for call in program.index(source).every(ast.Call) if scopes else ():
        if scope_of(call) in scopes:
            yield call


@cached_query
def _scopes_with_rank_tests(program: Program, source: Source) -> set[ast.AST]:
    """Functions and files with a condition on ranks; comprehensions and lambdas are separate."""
    index = program.index(source)
    # A model runs its `forward`, which has many conditions, seldom on ranks.
    conditional = [
        node
        for kind in (ast.If, ast.IfExp, ast.While)
        for node in index.every(kind)
        if getattr(scope_of(node), "name", "") != "forward"
    ]
    scopes: set[ast.AST] = {
        scope_of(node) for node in conditional if rank_tests(program, node.test)
    }
    for operation in index.every(ast.BoolOp):
        if isinstance(parent_of(operation), ast.Expr) and rank_tests(program, operation.values[0]):
            scopes.add(scope_of(operation))
    functions = [*index.every(ast.FunctionDef), *index.every(ast.AsyncFunctionDef)]
    return scopes | {function for function in functions if function.decorator_list}


def rank_filter(program: Program, call: ast.Call) -> RankFilter | None:
    """How ranks are excluded from a call; None if none is, if it is not certain, or if there is
    only one."""
    ranks = _filter_by_tests(program, call)
    if ranks is None or _is_after_failure(call):
        return None
    is_without_others = _is_for_one_process(program, call) or _is_by_turns(program, call)
    return None if is_without_others else ranks


def _filter_by_tests(program: Program, call: ast.Call) -> RankFilter | None:
    tests = _certain(rank_tests_at(program, call, with_exits=False))
    if tests:
        return RankFilter(tests, by_exit=False, region=_block_of(program, call))
    left = tuple(
        test for test in _certain(rank_tests_at(program, call)) if test.is_main is not None
    )
    if left:
        return RankFilter(left, by_exit=True, region=_rest(call))
    function = enclosing_function(call)
    decorator_tests = () if function is None else _certain(guards_of_decorators(program, function))
    return (
        RankFilter(decorator_tests, by_exit=False, region=_rest(call)) if decorator_tests else None
    )


def _certain(tests: Iterator[RankTest] | frozenset[RankTest]) -> tuple[RankTest, ...]:
    """Without tests of a rank within a group, which say nothing about other groups."""
    return tuple(test for test in tests if test.is_needed and test.kind != "group")


def _is_for_one_process(program: Program, call: ast.Call) -> bool:
    """Under `if not distributed`, also together with a rank; not `if not distributed or rank ==
    0`."""
    held = held_conditions(program, call)
    return any(
        says_distributed(program, test) is (not holds)
        for test, holds in held
        if not rank_tests(program, test)
    )


def _is_after_failure(call: ast.Call) -> bool:
    """In an `except`: the other ranks may wait in what failed here."""
    return any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call))


def _is_by_turns(program: Program, call: ast.Call) -> bool:
    """`for turn in range(world_size): if rank == turn: ...`: every rank enters, one after the
    other; and `while i + rank < total:`, which may turn as often on each."""
    for outer in ancestors(call):
        test = outer.test if isinstance(outer, ast.While) else None
        if test is not None and nodes_in(test, ast.BinOp) and rank_tests(program, test):
            return True
    loops = [outer for outer in ancestors(call) if isinstance(outer, ast.For)]
    turns = {name.id for loop in loops for name in nodes_in(loop.target, ast.Name)}
    return any(
        _is_compared_to(program, compare, turns)
        for test, _ in (conditions(program, call) if turns else ())
        for compare in nodes_in(test, ast.Compare)
    )


def _is_compared_to(program: Program, compare: ast.Compare, turns: set[str]) -> bool:
    """Whether the rank is compared with a loop variable; a loop variable in another condition does
    not count."""
    sides = [compare.left, *compare.comparators]
    ranks = [
        side for side in sides if any(isinstance(value, Rank) for value in program.values(side))
    ]
    return bool(ranks) and any(
        turns & {n.id for n in nodes_in(side, ast.Name)} for side in sides if side not in ranks
    )


def _block_of(program: Program, call: ast.Call) -> tuple[ast.AST, ...]:
    block: tuple[ast.AST, ...] = (statement_of(call),)
    inner: ast.AST = call
    for outer in ancestors(call):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if (
            isinstance(outer, (ast.If, ast.While))
            and inner is not outer.test
            and rank_tests(program, outer.test)
        ):
            block = tuple(outer.body if inner in outer.body else outer.orelse)
        inner = outer
    return block


def _rest(call: ast.Call) -> tuple[ast.AST, ...]:
    function = enclosing_function(call)
    body = function.body if function is not None else []
    around = [call, *ancestors(call)]
    first = next(
        (number for number, statement in enumerate(body) if statement in around), len(body)
    )
    return (*body[first:],) or (statement_of(call),)


def has_backward(program: Program, region: Sequence[ast.AST]) -> bool:
    """Whether gradients are computed and reduced there; not under `no_sync`."""
    return any(makes(program, node, _reduces_gradients) for node in region)


def _reduces_gradients(program: Program, call: ast.Call) -> bool:
    function = program.function_of(call) if is_backward(program, call) else None
    return (
        is_backward(program, call)
        and (function is None or not makes(program, function, is_backward))
        and not program.name_of(call.func).endswith("autograd.backward")
        and not is_within(call, "no_sync")
    )


def is_within(node: ast.AST, name: str) -> bool:
    """Whether it is in a block of `with model.NAME():`."""
    items = [
        item.context_expr
        for outer in ancestors(node)
        if isinstance(outer, ast.With)
        for item in outer.items
    ]
    return any(isinstance(item, ast.Call) and last_name(item.func) == name for item in items)
