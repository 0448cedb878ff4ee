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
    conditions.

    if dist.get_rank() == 0:
        dist.barrier()  # this call, and that the rank is 0
    """
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

    for operation in nodes_in(scope, ast.BoolOp):  # `rank == 0 and print("done")`
        is_statement = isinstance(parent_of(operation), ast.Expr)
        if is_statement and rank_tests(program, operation.values[0]):
            return True

    # A model runs its `forward`, which has many conditions, seldom on ranks.
    if getattr(scope, "name", "") == "forward":
        return False

    branches = nodes_in(scope, ast.If, ast.IfExp, ast.While)
    return any(rank_tests(program, branch.test) for branch in branches)


def excluding_tests(program: Program, call: ast.Call) -> tuple[RankTest, ...]:
    """The conditions on ranks around a call; empty if none keeps ranks away for certain.

    In an `except` the others may wait in what failed here, and ranks may take turns.
    """
    function = enclosing_function(call)
    decorated = () if function is None else guards_of_decorators(program, function)
    tests = [*rank_tests_at(program, call, with_exits=False), *decorated]

    # A rank within a group says nothing about other groups.
    certain = tuple(test for test in tests if test.is_needed and test.kind != "group")
    if not certain or any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call)):
        return ()
    if _is_for_one_process(program, call) or _is_by_turns(call):
        return ()

    return certain


def _is_for_one_process(program: Program, call: ast.Call) -> bool:
    """Under `if not distributed`, also together with a rank; not `if not distributed or rank ==
    0`."""
    for test, holds in held_conditions(program, call):
        if not rank_tests(program, test) and says_distributed(program, test) is (not holds):
            return True

    return False


def _is_by_turns(call: ast.Call) -> bool:
    """`for turn in range(world_size): if rank == turn: ...`, and `while i + rank < total:`."""
    loops = [outer for outer in ancestors(call) if isinstance(outer, ast.For)]
    turns = {name.id for loop in loops for name in nodes_in(loop.target, ast.Name)}

    for outer in ancestors(call):
        if isinstance(outer, ast.While) and nodes_in(outer.test, ast.BinOp):
            return True
        if isinstance(outer, (ast.If, ast.While)) and _compares_rank(outer.test, turns):
            return True

    return False


def _compares_rank(test: ast.expr, turns: set[str]) -> bool:
    """`rank == turn`, with one of these names."""
    for compare in nodes_in(test, ast.Compare):
        names = {name.id for name in nodes_in(compare, ast.Name)}
        if turns & names and "rank" in ast.unparse(compare).lower():
            return True

    return False


def has_backward(program: Program, node: ast.AST) -> bool:
    """Whether gradients are computed and reduced there; not under `no_sync`."""
    for call in calls_made_in(program, node):
        if not is_backward(call) or is_within(call, "no_sync"):
            continue
        if program.function_of(call) is not None:
            continue
        if not program.name_of(call.func).endswith("autograd.backward"):
            return True

    return False


def is_within(node: ast.AST, name: str) -> bool:
    """Whether it is in a block of `with model.NAME():`."""
    blocks = [outer for outer in ancestors(node) if isinstance(outer, ast.With)]
    items = [item.context_expr for block in blocks for item in block.items]
    return any(isinstance(item, ast.Call) and called_name(item) == name for item in items)
