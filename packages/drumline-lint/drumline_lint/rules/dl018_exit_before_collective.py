"""DL018: some ranks leave, and the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import flipped
from drumline_lint.program.tree import (
    LOOPS,
    above,
    function_around,
    position,
    statement_of,
    up,
)
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.collectives import collectives_in, short
from drumline_lint.running.conditions import (
    ENDING_CALLS,
    after_in_block,
    conditions,
    rank_tests,
    rank_tests_at,
)
from drumline_lint.running.distributed import framework
from drumline_lint.running.loops import reached
from drumline_lint.running.own_values import has_replicas, is_joined, loop_around, own_loss_in
from drumline_lint.running.reached_collectives import reached_in

RULE = Rule(
    id="DL018",
    name="exit-before-collective",
    severity=Severity.ERROR,
    summary="some ranks leave before a collective that the others come to",
    why=(
        "A collective needs a call from every rank, and the backward pass of a wrapped model has collectives too. "
        "Ranks that return, break or go on to the next batch before it leave the others waiting until the timeout "
        "ends the job. A condition on the loss of the rank's own batch is such a condition as well: it is another "
        "on every rank."
    ),
    fix="let every rank come to it: leave after it, or share the decision by all_reduce first and leave together",
    bad="""\
import torch
import torch.distributed as dist


def save(state):
    if dist.get_rank() != 0:
        return
    torch.save(state, "last.pt")
    dist.barrier()
""",
    good="""\
import torch
import torch.distributed as dist


def save(state):
    if dist.get_rank() == 0:
        torch.save(state, "last.pt")
    dist.barrier()
""",
)
Exit = ast.Return | ast.Break | ast.Continue | ast.Expr


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits under a condition on ranks, or on the loss of the rank's own batch."""
    for exit_ in _exits(program, source):
        missed = _missed(program, exit_)
        if missed is not None:
            tests = [test for test in _tests(program, exit_) if test.is_needed]
            yield RULE.at(source, exit_, f"{_who(tests[0])} here, and the others wait in {missed}")
        elif not isinstance(exit_, ast.Expr) and (loss := _own_loss(program, source, exit_)):
            said = f"{loss} is that of this rank's own batch: a rank that leaves here makes the others wait in backward"
            yield RULE.at(source, exit_, said)


def _exits(program: Program, source: Source) -> Iterator[Exit]:
    index = program.index(source)
    every: list[Exit] = [*index.every(ast.Return), *index.every(ast.Break), *index.every(ast.Continue)]
    for last in ("exit", "_exit", "quit"):
        for call in index.calls.get(last, ()):
            statement = up(call)
            if program.name_of(call.func) in ENDING_CALLS and isinstance(statement, ast.Expr):
                every.append(statement)
    yield from sorted(every, key=position)


def _tests(program: Program, exit_: Exit) -> list[RankTest]:
    """What is asked of the rank on the way to it, from where all ranks are together."""
    left = _left(exit_)
    found = []
    for test, holds in conditions(program, exit_, with_exits=False):
        if left is None or left in above(test):
            found += rank_tests(program, test, holds)
    return found


def _left(exit_: Exit) -> ast.AST | None:
    """The loop that is left or shortened; of a function there is no need to ask."""
    return loop_around(exit_) if isinstance(exit_, ast.Break | ast.Continue) else None


def _missed(program: Program, exit_: Exit) -> str | None:
    """What the others come to and those that leave do not."""
    if not any(test.is_needed for test in _tests(program, exit_)):
        return None
    done = {name for node in _own_block(exit_) for name, _ in collectives_in(program, node)}
    turned = flipped(frozenset(_tests(program, exit_)))
    others = [test for test in turned if isinstance(test, RankTest) and test.is_needed]
    for node in _what_others_do(program, exit_):
        for name, chain in reached_in(program, node, others):
            if name not in done and not _is_for_some(program, chain[0]):
                return f"{short(name)} (line {chain[0].lineno})"
        if _has_wrapped_backward(program, node):
            return "the backward pass"
    return None


def _is_for_some(program: Program, call: ast.Call) -> bool:
    """It is a mistake of its own then."""
    return any(test.is_needed for test in rank_tests_at(program, call, with_exits=False))


def _own_block(exit_: Exit) -> list[ast.stmt]:
    """The block that ends with the exit."""
    block = up(exit_)
    for name in ("body", "orelse"):
        statements = getattr(block, name, None)
        if isinstance(statements, list) and exit_ in statements:
            return statements
    return []


def _what_others_do(program: Program, exit_: Exit, depth: int = 0) -> Iterator[ast.AST]:
    """The rest of the blocks around it, and the loops that go on; whoever ends the process misses what comes later."""
    inner: ast.stmt = exit_
    for outer in above(exit_):
        yield from after_in_block(inner)
        if isinstance(outer, LOOPS):
            if isinstance(exit_, ast.Continue):
                return
            yield from outer.body
            if isinstance(exit_, ast.Break):
                return
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            break
        if isinstance(outer, ast.stmt):
            inner = outer
    function = function_around(exit_)
    if isinstance(exit_, ast.Expr) and function is not None and depth < 3:
        for call in program.callers(function):
            yield from _after_call(call)


def _after_call(call: ast.Call) -> Iterator[ast.AST]:
    statement = statement_of(call)
    yield from after_in_block(statement)


def _has_wrapped_backward(program: Program, node: ast.AST) -> bool:
    """Of a tensor; torch.distributed.autograd has a function of that name."""
    calls = reached(program, node, "backward") if has_replicas(program) else iter(())
    return any(not program.name_of(call.func).endswith("autograd.backward") for call in calls)


def _own_loss(program: Program, source: Source, exit_: Exit) -> str:
    """The loss that decides whether a rank leaves a training loop, or skips its backward pass."""
    loop = loop_around(exit_)
    if loop is None or framework(program, source) or is_joined(loop):
        return ""
    if isinstance(exit_, ast.Continue):
        after = [node for node in _what_others_do(program, exit_) if _has_wrapped_backward(program, node)]
        if not after:
            return ""
    for test, _ in conditions(program, exit_, with_exits=False):
        if loop in above(test) and (loss := own_loss_in(program, test, loop)):
            return loss
    return ""


def _who(test: RankTest) -> str:
    if test.is_main is None:
        return "some ranks leave"
    if test.is_main:
        return "one process of each node leaves" if test.kind == "local" else "rank 0 leaves"
    return "all ranks but one leave"
