"""DL018: some ranks leave, and the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in, short_name
from drumline_lint.flow.conditions import conditions, rank_tests, rank_tests_at, rest_of_block
from drumline_lint.flow.loops import loop_around
from drumline_lint.flow.some_ranks import has_backward
from drumline_lint.program.program import Program
from drumline_lint.program.tree import LOOPS, ancestors, block_of, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any

RULE = rule("DL018")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`return`, `break` and `continue` under a condition that asks which rank this is."""
    index = program.index(source)
    for kind in (ast.Return, ast.Break, ast.Continue):
        for exit_ in index.every(kind):
            who = _who_leaves(program, exit_)
            missed = _missed(program, exit_) if who else ""
            if missed:
                yield RULE.at(source, exit_, f"{who} here, and the other ranks block in {missed}")


def _who_leaves(program: Program, exit_: ast.stmt) -> str:
    """In words; empty if it is not known who."""
    left = loop_around(exit_) if isinstance(exit_, (ast.Break, ast.Continue)) else None
    if isinstance(exit_, ast.Continue) and isinstance(left, ast.While):
        return ""  # the rank comes to the collective later
    held = conditions(program, exit_, with_exits=False)
    inside = [(test, holds) for test, holds in held if left is None or left in ancestors(test)]
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
        if isinstance(outer, LOOPS) and not isinstance(exit_, ast.Return):
            if isinstance(exit_, ast.Break):
                yield from outer.body
            return
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(outer, ast.stmt):
            inner = outer
