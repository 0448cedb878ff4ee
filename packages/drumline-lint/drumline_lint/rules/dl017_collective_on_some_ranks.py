"""DL017: only some ranks call a collective, and wait for the others forever."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from drumline_lint.findings import Finding, Severity, rule
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
from drumline_lint.program.tree import (
    FunctionNode,
    ancestors,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL017", only_distributed=False)
LONGEST_SHOWN = 3


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
        tests = _certain(program, call)
        for name, chain in _collectives_of_call(program, call, tests) if tests else ():
            if not has_counterpart(program, call, name, tests, find):
                message = _message(source, tests, name, chain)
                severity = None if _is_sure(tests, chain) else Severity.WARNING
                yield RULE.at(source, call, message, severity=severity)
                break


def _is_sure(tests: Sequence[RankTest], chain: Sequence[ast.Call]) -> bool:
    """What a long chain needs to be so is seldom all seen; `rank < n` may choose all of them."""
    return len(chain) <= LONGEST_SHOWN and any(test.is_main is not None for test in tests)


def _has_conditions(program: Program, call: ast.Call) -> bool:
    function = enclosing_function(call)
    is_decorated = function is not None and bool(function.decorator_list)
    return is_decorated or any(True for _ in conditions(program, call, with_exits=False))


def _certain(program: Program, call: ast.Call) -> Sequence[RankTest]:
    """The conditions around it that keep ranks away; early exits before it are another rule's."""
    ranks = rank_filter(program, call)
    return () if ranks is None or ranks.by_exit else ranks.tests


def _collectives_of_call(
    program: Program, call: ast.Call, tests: Sequence[RankTest]
) -> list[tuple[str, tuple[ast.Call, ...]]]:
    """The collectives of a call, directly or not, given its arguments; calls in arguments are
    checked separately."""
    if not any(chain[0] is call for _, chain in collectives_in(program, call)):
        return []
    reached = reached_by(program, call, tests)
    return [
        (name, chain)
        for name, chain in reached
        if not _serves(chain) and not _is_over_nothing(program, chain)
    ]


def _is_over_nothing(program: Program, chain: Sequence[ast.Call]) -> bool:
    """Whether a method goes over a dictionary of its object that nothing has filled there:
    `for meter in self.meters.values(): meter.synchronize()`."""
    return any(
        _is_never_filled(program, call, loop.iter.func.value.attr)
        for call, inner in pairwise(chain)
        for loop in ancestors(inner)
        if isinstance(loop, ast.For)
        and isinstance(loop.iter, ast.Call)
        and isinstance(loop.iter.func, ast.Attribute)
        and loop.iter.func.attr in ("values", "items")
        and isinstance(loop.iter.func.value, ast.Attribute)
    )


def _is_never_filled(program: Program, call: ast.Call, name: str) -> bool:
    """Whether a call is of a method of an object that is made in this function, all of whose other
    methods that are called there leave the dictionary alone."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(owner, ast.Name):
        return False
    makers = [binding.value for binding in program.bindings(owner)]
    uses = [
        parent_of(parent_of(use) or use)
        for use in nodes_in(scope_of(call), ast.Name)
        if use.id == owner.id and isinstance(use.ctx, ast.Load)
    ]
    methods = [
        program.function_of(use)
        for use in uses
        if isinstance(use, ast.Call) and use is not call and isinstance(use.func, ast.Attribute)
    ]
    num_others = len([use for use in uses if use is not call])
    return (
        bool(makers)
        and all(isinstance(maker, ast.Call) for maker in makers)
        and len(methods) == num_others
        and all(method is not None and not _names(method, name) for method in methods)
    )


def _names(function: FunctionNode, name: str) -> bool:
    attributes = nodes_in(function, ast.Attribute)
    return any(attribute.attr == name for attribute in attributes)


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
