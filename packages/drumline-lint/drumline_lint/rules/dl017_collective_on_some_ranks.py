"""DL017: only some ranks call a collective, and wait for the others forever."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import (
    collectives_in,
    has_counterpart,
    likely_collective_names,
    reached_by,
    short_name,
    who_calls,
)
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import distributed_sources, framework
from drumline_lint.flow.some_ranks import rank_filter
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, enclosing_function, last_name
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL017", only_distributed=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives under a condition on ranks, and calls there of functions that come to one."""
    if source not in distributed_sources(program) and not framework(program, source):
        return
    likely = likely_collective_names(program)
    # asked for a function by each of its calls
    find = cache(lambda node: tuple(collectives_in(program, node)))
    for call in program.index(source).every(ast.Call):
        if last_name(call.func) not in likely or not _has_conditions(program, call):
            continue
        collectives = _collectives_of_call(program, call)
        tests = _certain(program, call) if collectives else ()
        for name, chain in collectives if tests else ():
            if not has_counterpart(program, call, name, tests, find):
                yield RULE.at(source, call, _message(source, tests, name, chain))
                break


def _has_conditions(program: Program, call: ast.Call) -> bool:
    function = enclosing_function(call)
    is_decorated = function is not None and bool(function.decorator_list)
    return is_decorated or any(True for _ in conditions(program, call, with_exits=False))


def _certain(program: Program, call: ast.Call) -> Sequence[RankTest]:
    """The conditions around it that keep ranks away; early exits before it are another rule's."""
    ranks = rank_filter(program, call)
    return () if ranks is None or ranks.by_exit else ranks.tests


def _collectives_of_call(
    program: Program, call: ast.Call
) -> list[tuple[str, tuple[ast.Call, ...]]]:
    """The collectives of a call, directly or not, given its arguments; calls in arguments are
    checked separately."""
    if not any(chain[0] is call for _, chain in collectives_in(program, call)):
        return []
    reached = reached_by(program, call, _certain(program, call))
    return [(name, chain) for name, chain in reached if not _serves(chain)]


def _serves(chain: Sequence[ast.Call]) -> bool:
    """Whether the called function waits in a loop without end for what the other ranks send."""
    loops = [
        outer for inner in chain[1:] for outer in ancestors(inner) if isinstance(outer, ast.While)
    ]
    return any(isinstance(loop.test, ast.Constant) and loop.test.value for loop in loops)


def _message(
    source: Source, tests: Sequence[RankTest], name: str, chain: tuple[ast.Call, ...]
) -> str:
    who = who_calls(tests[0])
    first = source.code(chain[0].func)
    if len(chain) == 1:
        return f"{who} {first}, which blocks until every rank calls it"
    through = " and ".join(ast.unparse(call.func) for call in chain[1:-1])
    by = f" through {through}" if through else ""
    return (
        f"{who} {first}, which calls {short_name(name)}{by}: that blocks until every rank calls it"
    )
