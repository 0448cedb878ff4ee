"""DL018: some ranks leave, and the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in, short_name
from drumline_lint.flow.conditions import (
    ENDING_CALLS,
    asks_for_debugging,
    conditions,
    names_option,
    rank_tests,
    rank_tests_at,
    rest_of_block,
    split_condition,
)
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import says_distributed
from drumline_lint.flow.loops import loop_around
from drumline_lint.flow.some_ranks import has_backward
from drumline_lint.program.program import Program
from drumline_lint.program.tree import LOOPS, ancestors, block_of, dotted, nodes_in, parent_of
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any

RULE = rule("DL018")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`return`, `break` and `continue` under a condition that asks which rank this is."""
    index = program.index(source)
    for kind in (ast.Return, ast.Break, ast.Continue, ast.Expr):
        for exit_ in index.every(kind):
            if kind is ast.Expr and not _ends_well(program, exit_):
                continue
            who = _who_leaves(program, exit_)
            missed = _missed(program, exit_) if who else ""
            if missed:
                message = f"{who} here, and the other ranks block in {missed}"
                is_sure = is_of_ranks(program, source) and _is_by_ranks(program, exit_)
                severity = None if is_sure else Severity.NOTE
                yield RULE.at(source, exit_, message, severity=severity)


def _ends_well(program: Program, statement: ast.Expr) -> bool:
    """`sys.exit()`, without an error: the launcher then waits for the other ranks."""
    call = statement.value
    if not isinstance(call, ast.Call) or program.name_of(call.func) not in ENDING_CALLS:
        return False
    return not call.args or program.values(call.args[0]) == {ConstantValue(0)}


def _is_by_ranks(program: Program, exit_: ast.stmt) -> bool:
    """Whether every condition around it asks for the rank, or for what the loop computes; one on an
    option may hold in no run."""
    for test, holds in _held_inside(exit_, conditions(program, exit_, with_exits=False)):
        is_of_loop = isinstance(parent_of(test), ast.While)
        for part, part_holds in () if is_of_loop else split_condition(test, holds):
            is_by_rank = bool(rank_tests(program, part, part_holds))
            is_by_rank = is_by_rank or says_distributed(program, part) is part_holds
            if not is_by_rank and not _is_computed(exit_, part):
                return False
    return True


def _held_inside(
    exit_: ast.stmt, held: Iterable[tuple[ast.expr, bool]]
) -> list[tuple[ast.expr, bool]]:
    """The conditions between it and the loop that it leaves."""
    left = loop_around(exit_) if isinstance(exit_, (ast.Break, ast.Continue)) else None
    return [(test, holds) for test, holds in held if left is None or left in ancestors(test)]


def _is_computed(exit_: ast.stmt, test: ast.expr) -> bool:
    """Whether it asks for something that the loop around sets; beside an option, a counter is not
    enough."""
    loop = next((outer for outer in ancestors(exit_) if isinstance(outer, LOOPS)), None)
    if loop is None:
        return False
    set_there = _assigned_in(loop)
    if asks_for_debugging(test):
        return False
    if not names_option(ast.unparse(test).lower()):
        set_there |= _names(loop.target) if isinstance(loop, ast.For) else set()
    return not set_there.isdisjoint(_names(test))


def _names(node: ast.AST) -> set[str]:
    return {dotted(name) for name in nodes_in(node, ast.Name, ast.Attribute)} - {""}


def _assigned_in(loop: ast.AST) -> set[str]:
    targets = [target for made in nodes_in(loop, ast.Assign) for target in made.targets]
    targets += [made.target for made in nodes_in(loop, ast.AugAssign)]
    changed = [
        call.func.value for call in nodes_in(loop, ast.Call) if isinstance(call.func, ast.Attribute)
    ]
    names = {name for part in (*targets, *changed) for name in _names(part)}
    return {name for name in names if not names_option(name.lower())}


def _who_leaves(program: Program, exit_: ast.stmt) -> str:
    """In words; empty if it is not known who."""
    if isinstance(exit_, ast.Continue) and isinstance(loop_around(exit_), ast.While):
        return ""  # the rank comes to the collective later
    inside = _held_inside(exit_, conditions(program, exit_, with_exits=False))
    tests = [part for test, holds in inside for part in rank_tests(program, test, holds)]
    every = [test for test in tests if test.is_needed and test.kind != "group"]
    if not every or any(test.is_main is None for test in every):
        return ""
    if not every[0].is_main:
        return "all ranks but one leave"
    return "one process of each node leaves" if every[0].kind == "local" else "rank 0 leaves"


def _missed(program: Program, exit_: ast.stmt) -> str:
    """What the others block in; empty if they do not."""
    done = {name for node in block_of(exit_) for name, _ in collectives_in(program, node)}
    for node in _what_others_do(exit_):
        for name, chain in collectives_in(program, node):
            # A collective for some ranks is a mistake of its own.
            is_for_some = any(rank_tests_at(program, chain[0], with_exits=False))
            if name not in done and not is_for_some and not _is_left_before(node, chain[0]):
                return f"{short_name(name)} ({program.source_of(chain[0]).where(chain[0])})"
        if wraps_any(program) and has_backward(program, node):
            return "the backward pass"
    return ""


def _is_left_before(node: ast.AST, call: ast.Call) -> bool:
    """Whether the other ranks may return before they come to the call."""
    returns = [] if isinstance(node, LOOPS) else nodes_in(node, ast.Return)
    return any(left.lineno < call.lineno for left in returns)


def _what_others_do(exit_: ast.stmt) -> Iterator[ast.AST]:
    """The rest of the blocks around it, and the loops that continue."""
    inner: ast.stmt = exit_
    for outer in ancestors(exit_):
        yield from rest_of_block(inner)
        if isinstance(outer, LOOPS) and isinstance(exit_, ast.Break | ast.Continue):
            if isinstance(exit_, ast.Break):
                yield from outer.body
            return
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(outer, ast.stmt):
            inner = outer
