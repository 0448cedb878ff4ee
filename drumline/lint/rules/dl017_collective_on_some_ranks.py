"""DL017: some ranks call a collective, and wait for the others for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from drumline.lint.finding import Finding, Severity
from drumline.lint.program.collectives import collective, collectives_in, likely_names, short
from drumline.lint.program.conditions import after_in_block, conditions, leaves, rank_tests, rank_tests_at
from drumline.lint.program.guards import guards_of_decorators
from drumline.lint.program.program import Program
from drumline.lint.program.tree import above, function_around, last_name
from drumline.lint.program.value import RankTest
from drumline.lint.reading.source import Source
from drumline.lint.rule import Rule

RULE = Rule(
    id="DL017",
    name="collective-on-some-ranks",
    severity=Severity.ERROR,
    summary="a collective is called by some ranks only",
    why=(
        "A collective needs a call from every rank of the group. Those that come to it wait for those that never "
        "do, until the timeout ends the job; or it meets the next collective of the others, and what comes of "
        "that is wrong."
    ),
    fix="call it on every rank, outside of the condition, and keep only what is for one rank inside",
    bad="""\
import torch
import torch.distributed as dist

if dist.get_rank() == 0:
    torch.save({"step": 1}, "last.pt")
    dist.barrier()
""",
    good="""\
import torch
import torch.distributed as dist

if dist.get_rank() == 0:
    torch.save({"step": 1}, "last.pt")
dist.barrier()
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives under a condition on ranks, and calls there of functions that come to one."""
    likely = likely_names(program)
    for call in program.index(source).every(ast.Call):
        if last_name(call.func) not in likely or not _has_conditions(program, call):
            continue
        found = _collectives_of_call(program, call)
        tests = _certain(program, call) if found else []
        for name, chain in found if tests else ():
            if not _has_counterpart(program, call, name, tests):
                yield RULE.at(source, call, _said(source, tests, name, chain))
                break


def _has_conditions(program: Program, call: ast.Call) -> bool:
    """At the first look, which costs little."""
    function = function_around(call)
    is_decorated = function is not None and bool(function.decorator_list)
    is_in_case = any(isinstance(outer, ast.match_case) for outer in above(call))
    return is_decorated or is_in_case or any(True for _ in conditions(program, call, with_exits=False))


def _certain(program: Program, call: ast.Call) -> list[RankTest]:
    """The conditions around it that keep ranks away; early exits before it are another rule's."""
    function = function_around(call)
    tests = [*rank_tests_at(program, call, with_exits=False)]
    if function is not None and collective(program, call):
        tests += guards_of_decorators(program, function)
    return [test for test in tests if test.is_needed]


def _collectives_of_call(program: Program, call: ast.Call) -> list[tuple[str, tuple[ast.Call, ...]]]:
    """What it is, or comes to; arguments speak for themselves."""
    return [(name, chain) for name, chain in collectives_in(program, call) if chain[0] is call]


def _has_counterpart(program: Program, call: ast.Call, name: str, tests: list[RankTest]) -> bool:
    """Whether the ranks that are kept away here call the same elsewhere in the function."""
    if any(name in _names_in(program, others) for others in _other_branches(program, call)):
        return True
    function = function_around(call) or program.source_of(call).tree
    for other_name, chain in collectives_in(program, function):
        other = chain[0]
        if other_name == name and other is not call:
            there = [test for test in rank_tests_at(program, other) if test.is_needed]
            is_same = _written(program, call) == _written(program, other)
            if not is_same and any(_are_opposite(one, another) for one in tests for another in there):
                return True
    return False


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


def _names_in(program: Program, nodes: Sequence[ast.AST]) -> set[str]:
    return {name for node in nodes for name, _ in collectives_in(program, node)}


def _are_opposite(one: RankTest, other: RankTest) -> bool:
    """Rank 0 here and the others there; of conditions that are not about rank 0, none is known to be the same."""
    if one.is_main is None or other.is_main is None:
        return one.is_main is other.is_main
    return one.kind == other.kind and one.is_main != other.is_main


def _said(source: Source, tests: list[RankTest], name: str, chain: tuple[ast.Call, ...]) -> str:
    who = _who(tests[0])
    first = source.code(chain[0].func)
    if len(chain) == 1:
        return f"{who} to {first}, which waits until every rank has come"
    through = " and ".join(_called(call) for call in chain[1:-1])
    by = f" through {through}" if through else ""
    return f"{who} to {first}, which calls {short(name)}{by}, and that waits until every rank has come"


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _who(test: RankTest) -> str:
    if test.is_main:
        return "one process of each node comes" if test.kind == "local" else "rank 0 alone comes"
    return "only some ranks come" if test.is_main is None else "all ranks but one come"
