"""Places that a condition in their own function keeps from some ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from drumline_lint.flow.conditions import held_conditions, rank_tests, rank_tests_at
from drumline_lint.flow.guards import guards_of_decorators, says_distributed
from drumline_lint.flow.loops import calls_made_in, is_backward
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ScopeNode,
    ancestors,
    called_name,
    enclosing_function,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import RankTest


def calls_under_rank_tests(
    program: Program, calls: Iterable[ast.Call]
) -> Iterator[tuple[ast.Call, tuple[RankTest, ...]]]:
    """Those that a condition on ranks in their own function keeps from some ranks, with the
    conditions."""
    for call in calls:
        tests = excluding_tests(program, call)
        if tests and _has_rank_test(program, scope_of(call)):
            yield call, tests


@cached_query
def _has_rank_test(program: Program, scope: ScopeNode) -> bool:
    """Whether a function or file is decorated or has a condition on ranks; comprehensions and
    lambdas are separate."""
    if getattr(scope, "decorator_list", ()) and not isinstance(scope, ast.ClassDef):
        return True
    for operation in nodes_in(scope, ast.BoolOp):
        is_statement = isinstance(parent_of(operation), ast.Expr)
        if is_statement and rank_tests(program, operation.values[0]):
            return True
    # A model runs its `forward`, which has many conditions, seldom on ranks.
    if getattr(scope, "name", "") == "forward":
        return False
    branches = nodes_in(scope, ast.If, ast.IfExp, ast.While)
    return any(rank_tests(program, branch.test) for branch in branches)


def excluding_tests(program: Program, call: ast.Call) -> tuple[RankTest, ...]:
    """The conditions on ranks around a call; empty if none keeps ranks away for certain: in an
    `except` the others may wait in what failed here, and ranks may take turns."""
    function = enclosing_function(call)
    decorated = () if function is None else guards_of_decorators(program, function)
    tests = [*rank_tests_at(program, call, with_exits=False), *decorated]
    # a rank within a group says nothing about other groups
    certain = tuple(test for test in tests if test.is_needed and test.kind != "group")
    if not certain or any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call)):
        return ()
    return () if _is_for_one_process(program, call) or _is_by_turns(call) else certain


def _is_for_one_process(program: Program, call: ast.Call) -> bool:
    """Under `if not distributed`, also together with a rank; not `if not distributed or rank ==
    0`."""
    return any(
        says_distributed(program, test) is (not holds)
        for test, holds in held_conditions(program, call)
        if not rank_tests(program, test)
    )


def _is_by_turns(call: ast.Call) -> bool:
    """`for turn in range(world_size): if rank == turn: ...`, and `while i + rank < total:`."""
    loops = [outer for outer in ancestors(call) if isinstance(outer, ast.For)]
    turns = {name.id for loop in loops for name in nodes_in(loop.target, ast.Name)}
    for outer in ancestors(call):
        test = outer.test if isinstance(outer, (ast.If, ast.While)) else None
        if isinstance(outer, ast.While) and nodes_in(outer.test, ast.BinOp):
            return True
        for compare in nodes_in(test, ast.Compare) if test is not None and turns else ():
            if "rank" in ast.unparse(compare).lower() and turns & {
                name.id for name in nodes_in(compare, ast.Name)
            }:
                return True
    return False


def has_backward(program: Program, node: ast.AST) -> bool:
    """Whether gradients are computed and reduced there; not under `no_sync`."""
    return any(
        is_backward(call)
        and not is_within(call, "no_sync")
        and program.function_of(call) is None
        and not program.name_of(call.func).endswith("autograd.backward")
        for call in calls_made_in(program, node)
    )


def is_within(node: ast.AST, name: str) -> bool:
    """Whether it is in a block of `with model.NAME():`."""
    blocks = [outer for outer in ancestors(node) if isinstance(outer, ast.With)]
    items = [item.context_expr for block in blocks for item in block.items]
    return any(isinstance(item, ast.Call) and called_name(item) == name for item in items)
