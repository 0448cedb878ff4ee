"""DL018: some ranks leave, and the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in, reached_in, short_name
from drumline_lint.flow.conditions import are_exclusive, conditions, rank_tests, rank_tests_at
from drumline_lint.flow.exits import Exit, exits, what_others_do
from drumline_lint.flow.loops import loop_around
from drumline_lint.flow.some_ranks import has_backward
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import negated
from drumline_lint.program.tree import ancestors, block_of
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any

RULE = rule("DL018")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits under a condition on ranks."""
    for exit_ in exits(program, source):
        tests = _tests(program, exit_)
        # a rank within a group says nothing about other groups
        needed = [test for test in tests if test.is_needed and test.kind != "group"]
        if any(test.is_main is None for test in needed) and _is_asked_more(program, exit_):
            continue
        is_sure = bool(needed) and not _fails(exit_) and not _tries_again(exit_)
        missed = _missed(program, exit_, tests) if is_sure else ""
        if missed:
            # `rank >= count` may hold on none
            is_known = all(test.is_main is not None for test in needed)
            yield RULE.at(
                source,
                exit_,
                f"{_who(needed[0])} here, and the other ranks block in {missed}",
                severity=None if is_known else Severity.NOTE,
            )


def _is_asked_more(program: Program, exit_: Exit) -> bool:
    """Whether a condition on something else decides, too."""
    held = conditions(program, exit_, with_exits=False)
    return not all(rank_tests(program, test, holds) for test, holds in held)


def _fails(exit_: Exit) -> bool:
    """`sys.exit(1)`: the launcher ends the other ranks as well."""
    call = exit_.value if isinstance(exit_, ast.Expr) else None
    code = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return isinstance(code, ast.Constant) and bool(code.value)


def _tries_again(exit_: Exit) -> bool:
    """`continue` in a loop without end: the rank comes to the collective later."""
    loop = loop_around(exit_) if isinstance(exit_, ast.Continue) else None
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _tests(program: Program, exit_: Exit) -> list[RankTest]:
    """What is asked of the rank on the way to it, from where all ranks are together."""
    left = loop_around(exit_) if isinstance(exit_, ast.Break | ast.Continue) else None
    tests = []
    for test, holds in conditions(program, exit_, with_exits=False):
        if left is None or left in ancestors(test):
            tests += rank_tests(program, test, holds)
    return tests


def _missed(program: Program, exit_: Exit, tests: list[RankTest]) -> str:
    """What the others block in; empty if they do not."""
    done = {name for node in block_of(exit_) for name, _ in collectives_in(program, node)}
    remaining_tests = [
        test for test in negated(frozenset(tests)) if isinstance(test, RankTest) and test.is_needed
    ]
    for node in what_others_do(program, exit_):
        for name, chain in reached_in(program, node, remaining_tests):
            is_other_run = are_exclusive(program, exit_, chain[0], with_exits=False)
            # A collective for some ranks is a mistake of its own.
            is_for_some = any(
                test.is_needed for test in rank_tests_at(program, chain[0], with_exits=False)
            )
            if name not in done and not is_for_some and not is_other_run:
                return f"{short_name(name)} ({program.source_of(chain[0]).where(chain[0])})"
        if wraps_any(program) and has_backward(program, [node]):
            return "the backward pass"
    return ""


def _who(test: RankTest) -> str:
    if test.is_main is None:
        return "some ranks leave"
    if test.is_main:
        return "one process of each node leaves" if test.kind == "local" else "rank 0 leaves"
    return "all ranks but one leave"
