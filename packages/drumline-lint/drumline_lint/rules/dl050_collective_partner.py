"""DL050: ranks name partners that do not match."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.calls import argument
from drumline_lint.program.origins import is_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, calls_beside, is_after, nodes_in
from drumline_lint.reading.source import Source

RULE = rule("DL050", only_distributed=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Sends that all ranks make first, and groups that not all ranks make."""
    severity = Severity.WARNING if is_of_ranks(program, source) else None
    for call in program.calls(source, "torch.distributed.send"):
        if _waits_first(program, call):
            message = "every rank sends first, and waits for a partner that does the same"
            yield RULE.at(source, call, message, severity=severity)
    for call in program.calls(source, "torch.distributed.new_group"):
        if _is_own_group(program, call):
            message = "each rank makes only its own group, and every rank must make all groups"
            yield RULE.at(source, call, message, severity=severity)
        elif _is_of_members(call) or _is_of_some_ranks(program, call):
            message = "only its members make this group, and every rank must make all groups"
            yield RULE.at(source, call, message, severity=severity)


def _is_of_members(call: ast.Call) -> bool:
    """`if rank in ranks: group = dist.new_group(ranks)`"""
    ranks = argument(call, 0, "ranks")
    if ranks is None or argument(call, None, "use_local_synchronization") is not None:
        return False
    tests = [outer.test for outer in ancestors(call) if isinstance(outer, ast.If)]
    return any(
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.In)
        and ast.unparse(test.comparators[0]) == ast.unparse(ranks)
        for test in tests
    )


def _is_of_some_ranks(program: Program, call: ast.Call) -> bool:
    """A group under a condition on the rank, which no rank makes elsewhere in this function; in a
    loop over groups, the rank may be that of a member."""
    ranks = argument(call, 0, "ranks")
    is_local = argument(call, None, "use_local_synchronization") is not None
    if ranks is None or is_local or loop_around(call) is not None:
        return False
    calls = [
        nearby
        for nearby in calls_beside(call)
        if program.name_of(nearby.func) == "torch.distributed.new_group"
    ]
    members = [argument(nearby, 0, "ranks") for nearby in calls if nearby is not call]
    texts = [ast.unparse(part) for part in members if part is not None]
    is_alike = ast.unparse(ranks) in texts
    tests = list(rank_tests_at(program, call, with_exits=False))
    is_of_main = any(test.is_main is not None for test in tests)  # as any collective
    return bool(tests) and not is_alike and not is_of_main


def _waits_first(program: Program, call: ast.Call) -> bool:
    """`send`, then `recv`, on all ranks: each waits for its partner."""
    partners = [
        receive
        for receive in calls_beside(call)
        if program.name_of(receive.func) == "torch.distributed.recv"
    ]
    if any(conditions(program, call)):
        return False
    return any(
        is_after(receive, call) and not any(conditions(program, receive)) for receive in partners
    )


def _is_own_group(program: Program, call: ast.Call) -> bool:
    """Members that are computed from this rank: every rank must make every group."""
    ranks = argument(call, 0, "ranks")
    names = nodes_in(ranks, ast.Name) if ranks is not None else []
    kinds = [binding.kind for name in names for binding in program.bindings(name)]
    is_known = "parameter" in kinds or "each" in kinds
    is_alone = isinstance(ranks, ast.List) and len(ranks.elts) == 1
    is_local = argument(call, None, "use_local_synchronization") is not None
    if is_known or is_alone or is_local or any(rank_tests_at(program, call)):
        return False
    return any(is_rank(program, part) for part in parts(program, ranks))
