"""DL050: ranks name partners that do not match.

A send is matched by a receive of the partner, a group by the same call on every rank, also on those
that are not its members.
"""

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
    """Sends that all ranks make first, and groups that not all ranks make.

    A group with `use_local_synchronization` is made by its members alone.
    """
    severity = Severity.WARNING if is_of_ranks(program, source) else None

    for call in program.calls(source, "torch.distributed.send"):
        if _waits_first(program, call):
            message = "every rank sends first, and waits for a partner that does the same"
            yield RULE.at(source, call, message, severity=severity)

    for call in program.calls(source, "torch.distributed.new_group"):
        ranks = argument(call, 0, "ranks")
        if ranks is None or argument(call, None, "use_local_synchronization") is not None:
            continue

        if _is_computed_of_rank(program, call, ranks):
            message = "each rank makes only its own group, and every rank must make all groups"
            yield RULE.at(source, call, message, severity=severity)
        elif _is_for_members(call, ranks) or _is_of_some_ranks(program, call, ranks):
            message = "only its members make this group, and every rank must make all groups"
            yield RULE.at(source, call, message, severity=severity)


def _waits_first(program: Program, send: ast.Call) -> bool:
    """Whether all ranks send, and receive only then: each waits for its partner.

    dist.send(tensor, partner)
    dist.recv(tensor, partner)
    """
    if any(conditions(program, send)):
        return False

    for call in calls_beside(send):
        if program.name_of(call.func) != "torch.distributed.recv" or not is_after(call, send):
            continue
        if not any(conditions(program, call)):
            return True

    return False


# The members of a group.


def _is_computed_of_rank(program: Program, call: ast.Call, ranks: ast.expr) -> bool:
    """Whether the members depend on the rank that makes the group.

    first = rank - rank % 2
    group = dist.new_group([first, first + 1])
    """
    if isinstance(ranks, ast.List) and len(ranks.elts) == 1:
        return False
    if any(rank_tests_at(program, call)):
        return False

    bindings = [part for name in nodes_in(ranks, ast.Name) for part in program.bindings(name)]
    if any(binding.kind in ("parameter", "each") for binding in bindings):
        return False

    return any(is_rank(program, part) for part in parts(program, ranks))


def _is_for_members(call: ast.Call, ranks: ast.expr) -> bool:
    """Whether only ranks that are in a list make its group.

    if rank in ranks:
        group = dist.new_group(ranks)
    """
    for outer in ancestors(call):
        test = outer.test if isinstance(outer, ast.If) else None
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.In):
            continue
        if ast.unparse(test.comparators[0]) == ast.unparse(ranks):
            return True

    return False


def _is_of_some_ranks(program: Program, call: ast.Call, ranks: ast.expr) -> bool:
    """Whether a group is under a condition on the rank, and no rank makes it elsewhere.

    if rank < 4:
        group = dist.new_group([0, 1, 2, 3])

    In a loop over groups, the rank may be that of a member.
    """
    tests = list(rank_tests_at(program, call, with_exits=False))
    if not tests or loop_around(call) is not None:
        return False
    if any(test.is_main is not None for test in tests):
        return False  # a mistake with any collective

    for nearby in calls_beside(call):
        if nearby is call or program.name_of(nearby.func) != "torch.distributed.new_group":
            continue

        members = argument(nearby, 0, "ranks")
        if members is not None and ast.unparse(members) == ast.unparse(ranks):
            return False

    return True
