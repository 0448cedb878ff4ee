"""Who comes to a place that is not for all ranks, and whether the others come to its like elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence

from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, function_around
from drumline_lint.program.value import RankTest
from drumline_lint.running.conditions import after_in_block, conditions, leaves, rank_tests, rank_tests_at

# What is looked for in a node: the name of each, and the calls that lead to it.
Find = Callable[[ast.AST], Iterable[tuple[str, tuple[ast.Call, ...]]]]


def has_counterpart(
    program: Program, call: ast.Call, name: str, tests: Sequence[RankTest], find: Find
) -> bool:
    """Whether the ranks that are kept away here call the same elsewhere in the function."""
    if any(name in _names_in(others, find) for others in _other_branches(program, call)):
        return True
    function = function_around(call) or program.source_of(call).tree
    for other_name, chain in find(function):
        other = chain[0]
        if other_name == name and other is not call:
            there = [test for test in rank_tests_at(program, other) if test.is_needed]
            is_same = _written(program, call) == _written(program, other)
            if not is_same and any(_are_opposite(one, another) for one in tests for another in there):
                return True
    return False


def who_comes(test: RankTest) -> str:
    """In words."""
    if test.is_main:
        return "one process of each node comes" if test.kind == "local" else "rank 0 alone comes"
    return "only some ranks come" if test.is_main is None else "all ranks but one come"


def _written(program: Program, node: ast.AST) -> list[tuple[str, bool]]:
    """The conditions of a place, to compare them."""
    return [(ast.dump(test), holds) for test, holds in conditions(program, node) if rank_tests(program, test)]


def _other_branches(program: Program, node: ast.AST) -> Iterator[list[ast.AST]]:
    """What is run instead, where a condition on ranks keeps one away."""
    inner: ast.AST = node
    for outer in above(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if not isinstance(outer, ast.If | ast.IfExp) or inner is outer.test:
            pass
        elif rank_tests(program, outer.test):
            yield _instead(program, outer, inner)
        inner = outer


def _instead(program: Program, branching: ast.If | ast.IfExp, taken: ast.AST) -> list[ast.AST]:
    if isinstance(branching, ast.IfExp):
        return [branching.orelse if taken is branching.body else branching.body]
    in_body = taken in branching.body
    own, other = (branching.body, branching.orelse) if in_body else (branching.orelse, branching.body)
    return [*other, *(after_in_block(branching) if leaves(program, own) else [])]


def _names_in(nodes: Sequence[ast.AST], find: Find) -> set[str]:
    return {name for node in nodes for name, _ in find(node)}


def _are_opposite(one: RankTest, other: RankTest) -> bool:
    """Rank 0 here and the others there; of conditions that are not about rank 0, none is known to be the same."""
    if one.is_main is None or other.is_main is None:
        return one.is_main is other.is_main
    return one.kind == other.kind and one.is_main != other.is_main
