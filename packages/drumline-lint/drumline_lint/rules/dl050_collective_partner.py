"""DL050: ranks name partners that do not match."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import has_group, short_name
from drumline_lint.flow.conditions import conditions, rank_tests, rank_tests_at
from drumline_lint.program.calls import argument
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    dotted,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source

RULE = rule("DL050", only_distributed=False)
_ROOTS = {
    "torch.distributed.broadcast": "src",
    "torch.distributed.broadcast_object_list": "src",
    "torch.distributed.scatter": "src",
    "torch.distributed.scatter_object_list": "src",
    "torch.distributed.reduce": "dst",
    "torch.distributed.gather": "dst",
    "torch.distributed.gather_object": "dst",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Roots that are another on every rank, sends that all ranks make first, and sums that only
    one rank has."""
    for call in program.calls(source, *_ROOTS):
        yield from _own_root(program, source, call)
    for first, second in (("send", "recv"), ("recv", "send")):
        for call in program.calls(source, f"torch.distributed.{first}"):
            yield from _waits_first(program, source, call, f"torch.distributed.{second}")
    for call in program.calls(source, "torch.distributed.new_group"):
        yield from _own_group(program, source, call)
    for branch in program.index(source).every(ast.If):
        yield from _another_order(program, source, branch)
    for call in program.calls(source, "torch.distributed.reduce"):
        yield from _used_everywhere(program, source, call)


def _own_root(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    name = program.name_of(call.func)
    root = argument(call, None, _ROOTS[name])
    if root is None and name.endswith(("broadcast", "reduce")) and len(call.args) > 1:
        root = call.args[1]
    origins = written_values(program, root)
    # a parameter `rank` may be the root; what asks for the rank is this one
    is_own = bool(origins) and all(
        isinstance(origin, ast.Call) and Rank("global") in program.values(origin)
        for origin in origins
    )
    if is_own and not has_group(program, call) and not any(rank_tests_at(program, call)):
        message = (
            f"every rank names itself as the {_ROOTS[name]} of {short_name(name)}: "
            "the ranks wait for different partners"
        )
        yield RULE.at(source, call, message)


def _waits_first(
    program: Program, source: Source, call: ast.Call, partner: str
) -> Iterator[Finding]:
    """`send`, then `recv`, on all ranks, or the other way round: each waits for its partner."""
    partners = [
        candidate
        for candidate in nodes_in(scope_of(call), ast.Call)
        if program.name_of(candidate.func) == partner
    ]
    is_first = any(
        position(candidate) > position(call) and not any(conditions(program, candidate))
        for candidate in partners
    )
    if is_first and not any(conditions(program, call)):
        first = "sends" if partner.endswith("recv") else "receives"
        message = f"every rank {first} first, and waits for a partner that does the same"
        yield RULE.at(source, call, message)


def _own_group(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """Members that are computed from this rank: every rank must make every group."""
    ranks = argument(call, 0, "ranks")
    if isinstance(ranks, ast.List) and len(ranks.elts) == 1:
        return  # a group of this rank alone waits for nobody
    names = nodes_in(ranks, ast.Name) if ranks is not None else []
    if any(binding.kind == "parameter" for name in names for binding in program.bindings(name)):
        return  # whoever calls the function knows which groups there are
    members = parts(program, ranks)
    is_own = any(isinstance(value, Rank) for part in members for value in program.values(part))
    if is_own and argument(call, None, "use_local_synchronization") is None:
        message = "each rank makes only its own group, and every rank must make all groups"
        yield RULE.at(source, call, message)


def _another_order(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """The same collectives in both branches of a condition on ranks, in another order, from another
    root or for other groups."""
    if not branch.orelse or not rank_tests(program, branch.test):
        return
    of_body = _collectives_written(program, branch.body)
    of_others = _collectives_written(program, branch.orelse)
    if of_body == of_others or sorted(map(_name, of_body)) != sorted(map(_name, of_others)):
        return
    calls = [call for statement in branch.body for call in nodes_in(statement, ast.Call)]
    first = next(call for call in calls if program.name_of(call.func) in COLLECTIVES)
    message = (
        "the other branch makes the same collectives in another order, "
        "from another root or for another group"
    )
    yield RULE.at(source, first, message)


def _collectives_written(program: Program, block: list[ast.stmt]) -> list[tuple[str, str]]:
    """The names, each with its root or its ranks."""
    calls = [call for statement in block for call in nodes_in(statement, ast.Call)]
    return [
        (name, _partners(call))
        for call in calls
        if (name := program.name_of(call.func)) in COLLECTIVES
    ]


def _partners(call: ast.Call) -> str:
    named = [argument(call, None, name) for name in ("src", "dst", "ranks")]
    if last_name(call.func) == "new_group":
        return " ".join(map(ast.unparse, call.args))
    if last_name(call.func) == "broadcast" and call.args:
        named.append(call.args[-1])
    return " ".join(
        ast.dump(value) for value in named if isinstance(value, ast.Constant | ast.List)
    )


def _name(written: tuple[str, str]) -> str:
    return written[0]


def _used_everywhere(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A sum that only `dst` has, by which every rank decides."""
    reduced = dotted(call.args[0]) if call.args else ""
    uses = [
        name
        for name in nodes_in(scope_of(call), ast.Name)
        if name.id == reduced and position(name) > position(call)
    ]
    deciding = [use for use in uses if _decides(program, use)]
    is_for_all = bool(deciding) and not any(rank_tests_at(program, call))
    if is_for_all and not any(any(rank_tests_at(program, use)) for use in deciding):
        message = f"only one rank has the sum in {reduced}, and every rank decides by it"
        yield RULE.at(source, call, message)


def _decides(program: Program, use: ast.Name) -> bool:
    """Whether it is in a condition, or what its function returns is in one of a caller."""
    statement = statement_of(use)
    if isinstance(statement, ast.If):
        is_left = nodes_in(statement, ast.Break, ast.Continue, ast.Return)
        return bool(is_left) and use in nodes_in(statement.test, ast.Name)
    function = enclosing_function(use)
    if not isinstance(statement, ast.Return) or function is None:
        return False
    return any(_result_decides(program, call) for call in program.callers(function))


def _result_decides(program: Program, call: ast.Call) -> bool:
    assignment = statement_of(call)
    targets = assignment.targets if isinstance(assignment, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return any(
        name.id in names
        for branch in nodes_in(scope_of(call), ast.If)
        if not rank_tests(program, branch.test) and not any(rank_tests_at(program, branch))
        for name in nodes_in(branch.test, ast.Name)
    )
