"""DL018: some ranks leave, and the others wait for them.

An exit is reported if a condition on the rank leads to it, and what follows needs every rank: a
collective, or the backward pass of a wrapped model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
from drumline_lint.program.tree import (
    LOOPS,
    ancestors,
    block_of,
    dotted,
    enclosing,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any

RULE = rule("DL018")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits under a condition that asks which rank this is.

    if rank != 0:
        return
    dist.barrier()
    """
    index = program.index(source)
    exits = [*index.every(ast.Return), *index.every(ast.Break), *index.every(ast.Continue)]
    exits += [statement for statement in index.every(ast.Expr) if _ends_well(program, statement)]

    for exit_ in exits:
        who = _who_leaves(program, exit_)
        missed = _missed(program, exit_) if who else ""
        if not missed:
            continue

        message = f"{who} here, and the other ranks block in {missed}"
        is_sure = is_of_ranks(program, source) and _is_by_ranks(program, exit_)
        severity = None if is_sure else Severity.NOTE
        yield RULE.at(source, exit_, message, severity=severity)


def _ends_well(program: Program, statement: ast.Expr) -> bool:
    """Whether it ends the process without an error: `sys.exit()`, `sys.exit(0)`.

    After an error, the launcher ends the other ranks; after this, it waits for them.
    """
    call = statement.value
    if not isinstance(call, ast.Call) or program.name_of(call.func) not in ENDING_CALLS:
        return False

    return not call.args or program.values(call.args[0]) == {ConstantValue(0)}


# The conditions of an exit.


def _conditions(program: Program, exit_: ast.stmt) -> list[tuple[ast.expr, bool]]:
    """The conditions around an exit; of `break` and `continue`, those inside the loop.

    if is_training:
        for batch in loader:
            if rank != 0:  # only this one decides about the break
                break
    """
    held = conditions(program, exit_, with_exits=False)
    loop = loop_around(exit_) if isinstance(exit_, ast.Break | ast.Continue) else None
    return [(test, holds) for test, holds in held if loop is None or loop in ancestors(test)]


def _who_leaves(program: Program, exit_: ast.stmt) -> str:
    """Who leaves, in words; empty if it is not known, or the ranks meet again.

    `if rank == 0: return` gives `rank 0 leaves`, `if rank != 0` gives `all ranks but one leave`.
    """
    if isinstance(exit_, ast.Continue) and isinstance(loop_around(exit_), ast.While):
        return ""  # the rank comes to the collective later

    held = _conditions(program, exit_)
    tests = [part for test, holds in held for part in rank_tests(program, test, holds)]
    tests = [test for test in tests if test.is_needed and test.kind != "group"]
    if not tests or any(test.is_main is None for test in tests):
        return ""

    if not tests[0].is_main:
        return "all ranks but one leave"

    return "one process of each node leaves" if tests[0].kind == "local" else "rank 0 leaves"


def _is_by_ranks(program: Program, exit_: ast.stmt) -> bool:
    """Whether every condition around an exit asks for the rank, or for what the loop computes.

    A condition on an option, `if args.export:`, may hold in no run.
    """
    for test, holds in _conditions(program, exit_):
        if isinstance(parent_of(test), ast.While):
            continue

        for part, part_holds in split_condition(test, holds):
            is_by_rank = bool(rank_tests(program, part, part_holds))
            is_by_rank = is_by_rank or says_distributed(program, part) is part_holds
            if not is_by_rank and not _is_computed(exit_, part):
                return False

    return True


def _is_computed(exit_: ast.stmt, test: ast.expr) -> bool:
    """Whether a test asks for something that the loop around the exit sets.

    for step, batch in enumerate(loader):
        loss = train(batch)
        if loss > limit and rank == 0:
            break

    Beside an option, a counter is not enough: `if step == args.max_steps`.
    """
    loop = enclosing(exit_, *LOOPS)
    if loop is None or asks_for_debugging(test):
        return False

    computed = _assigned_in(loop)
    if isinstance(loop, ast.For) and not names_option(ast.unparse(test).lower()):
        computed |= _names(loop.target)

    return not computed.isdisjoint(_names(test))


def _names(node: ast.AST) -> set[str]:
    """The names in it: `self.best`, `self` and `loss` of `self.best > loss`."""
    return {dotted(name) for name in nodes_in(node, ast.Name, ast.Attribute)} - {""}


def _assigned_in(loop: ast.AST) -> set[str]:
    """The names that a loop assigns, and the objects of which it calls methods.

    for batch in loader:
        losses.append(train(batch))  # losses
        best = min(losses)           # best
    """
    changed = [target for made in nodes_in(loop, ast.Assign) for target in made.targets]
    changed += [made.target for made in nodes_in(loop, ast.AugAssign)]
    for call in nodes_in(loop, ast.Call):
        if isinstance(call.func, ast.Attribute):
            changed.append(call.func.value)

    names = {name for part in changed for name in _names(part)}
    return {name for name in names if not names_option(name.lower())}


# What the other ranks do.


def _missed(program: Program, exit_: ast.stmt) -> str:
    """What the other ranks block in; empty if they do not.

    A collective that the rank calls before it leaves is none: it has met the others there.

    if rank == 0:
        dist.barrier()
        return
    dist.barrier()
    """
    done = {name for node in block_of(exit_) for name, _ in collectives_in(program, node)}

    for node in _what_others_do(exit_):
        for name, chain in collectives_in(program, node):
            call = chain[0]
            if name in done or _is_left_before(node, call):
                continue
            # A collective for some ranks is a mistake of its own.
            if not any(rank_tests_at(program, call, with_exits=False)):
                return f"{short_name(name)} ({program.source_of(call).where(call)})"

        if wraps_any(program) and has_backward(program, node):
            return "the backward pass"

    return ""


def _is_left_before(node: ast.AST, call: ast.Call) -> bool:
    """Whether the other ranks may return before they come to the call.

    if not metrics:
        return
    dist.all_reduce(metrics)
    """
    returns = [] if isinstance(node, LOOPS) else nodes_in(node, ast.Return)
    return any(left.lineno < call.lineno for left in returns)


def _what_others_do(exit_: ast.stmt) -> Iterator[ast.AST]:
    """The rest of the blocks around an exit, and the loops that continue.

    A `continue` leaves the others in the rest of the round, a `break` also in the rounds to come,
    and a `return` in everything that the function still does.
    """
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
