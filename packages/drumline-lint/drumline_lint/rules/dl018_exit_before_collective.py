"""DL018: some ranks leave, and the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in, reached_in, short_name
from drumline_lint.flow.conditions import (
    ENDING_CALLS,
    are_exclusive,
    conditions,
    rank_tests,
    rank_tests_at,
    rest_of_block,
)
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import calls_reached
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import negated
from drumline_lint.program.tree import (
    LOOPS,
    Loop,
    ancestors,
    enclosing_function,
    end_position,
    last_name,
    nodes_in,
    parent_of,
    position,
    statement_of,
)
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL018")
Exit = ast.Return | ast.Break | ast.Continue | ast.Expr


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits under a condition on ranks, or on the loss of the rank's own batch."""
    for exit_ in _exits(program, source):
        missed = _missed(program, exit_)
        if missed is not None:
            tests = [test for test in _tests(program, exit_) if test.is_needed]
            yield RULE.at(source, exit_, f"{_who(tests[0])} here, and the other ranks block in {missed}")
        elif not isinstance(exit_, ast.Expr) and (loss := _own_loss(program, source, exit_)):
            said = f"{loss} is of this rank's own batch: a rank that leaves here makes the others block in backward"
            yield RULE.at(source, exit_, said)


def _exits(program: Program, source: Source) -> Iterator[Exit]:
    index = program.index(source)
    every: list[Exit] = [*index.every(ast.Return), *index.every(ast.Break), *index.every(ast.Continue)]
    for last in ("exit", "_exit", "quit"):
        for call in index.calls.get(last, ()):
            statement = parent_of(call)
            if program.name_of(call.func) in ENDING_CALLS and isinstance(statement, ast.Expr):
                every.append(statement)
    yield from sorted(every, key=position)


def _tests(program: Program, exit_: Exit) -> list[RankTest]:
    """What is asked of the rank on the way to it, from where all ranks are together."""
    left = _left(exit_)
    found = []
    for test, holds in conditions(program, exit_, with_exits=False):
        if left is None or left in ancestors(test):
            found += rank_tests(program, test, holds)
    return found


def _left(exit_: Exit) -> ast.AST | None:
    """The loop that is left or shortened; of a function there is no need to ask."""
    return loop_around(exit_) if isinstance(exit_, ast.Break | ast.Continue) else None


def _missed(program: Program, exit_: Exit) -> str | None:
    if not any(test.is_needed for test in _tests(program, exit_)):
        return None
    done = {name for node in _own_block(exit_) for name, _ in collectives_in(program, node)}
    turned = negated(frozenset(_tests(program, exit_)))
    others = [test for test in turned if isinstance(test, RankTest) and test.is_needed]
    for node in _what_others_do(program, exit_):
        for name, chain in reached_in(program, node, others):
            is_other_run = are_exclusive(program, exit_, chain[0], with_exits=False)
            if name not in done and not _is_for_some(program, chain[0]) and not is_other_run:
                return f"{short_name(name)} (line {chain[0].lineno})"
        if _has_wrapped_backward(program, node):
            return "the backward pass"
    return None


def _is_for_some(program: Program, call: ast.Call) -> bool:
    """It is a mistake of its own then."""
    return any(test.is_needed for test in rank_tests_at(program, call, with_exits=False))


def _own_block(exit_: Exit) -> list[ast.stmt]:
    block = parent_of(exit_)
    for name in ("body", "orelse"):
        statements = getattr(block, name, None)
        if isinstance(statements, list) and exit_ in statements:
            return statements
    return []


def _what_others_do(program: Program, exit_: Exit, depth: int = 0) -> Iterator[ast.AST]:
    """The rest of the blocks around it, and the loops that go on; whoever ends the process misses what comes later."""
    inner: ast.stmt = exit_
    for outer in ancestors(exit_):
        yield from rest_of_block(inner)
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
    function = enclosing_function(exit_)
    if isinstance(exit_, ast.Expr) and function is not None and depth < 3:
        for call in program.callers(function):
            yield from _after_call(call)


def _after_call(call: ast.Call) -> Iterator[ast.AST]:
    statement = statement_of(call)
    yield from rest_of_block(statement)


def _has_wrapped_backward(program: Program, node: ast.AST) -> bool:
    """Of a tensor; torch.distributed.autograd has a function of that name."""
    calls = calls_reached(program, node, "backward") if has_replicas(program) else iter(())
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
        if loop in ancestors(test) and (loss := own_loss_in(program, test, loop)):
            return loss
    return ""


def _who(test: RankTest) -> str:
    if test.is_main is None:
        return "some ranks leave"
    if test.is_main:
        return "one process of each node leaves" if test.kind == "local" else "rank 0 leaves"
    return "all ranks but one leave"


# The value stays that of this rank.
_KEEPING = ("item", "detach", "float", "mean", "sum", "cpu", "abs", "data", "any", "all")
_ASKING = ("isnan", "isinf", "isfinite", "is_nan")
_SHARING_WORDS = ("reduce", "gather", "sync", "broadcast", "across")
DEEPEST = 3


def own_loss_in(program: Program, test: ast.expr, loop: Loop) -> str:
    """The name of the loss of this rank that a condition in a training loop asks for; empty if it asks for none."""
    if not _is_asking(test) or _is_shared_before(program, test, loop) or not has_replicas(program):
        return ""
    losses = set(_losses(loop))
    for asked in nodes_in(test, ast.Name, ast.Attribute):
        found = _loss_behind(program, asked, losses)
        if found:
            return found
    return ""


def has_replicas(program: Program) -> bool:
    """Whether a model is wrapped somewhere, so that its backward pass is a collective."""
    return program.cached("has replicas", lambda: next(program.all_calls(DDP, *FSDP), None) is not None)


def _losses(loop: Loop) -> Iterator[str]:
    """Of `loss.backward()`, `out.loss.backward()` and `scaler.scale(loss).backward()`."""
    parts = list(nodes_in(loop, ast.Name, ast.Attribute))
    made = {ast.unparse(part) for part in parts if isinstance(part.ctx, ast.Store)}
    for call in nodes_in(loop, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            for part in nodes_in(call.func.value, ast.Name, ast.Attribute):
                is_loss = isinstance(part, ast.Name) or _is_loss_of(part, made)
                if is_loss and not _is_owner(part, call.func):
                    yield ast.unparse(part)


def _is_owner(part: ast.Name | ast.Attribute, asked: ast.Attribute) -> bool:
    """Of something else: `args` of `args.weight * loss`, `scaler` of `scaler.scale(loss)`; `loss.mean()` is a loss."""
    outer = parent_of(part)
    return isinstance(outer, ast.Attribute) and outer is not asked and outer.attr not in _KEEPING


def _is_loss_of(part: ast.Attribute, made: set[str]) -> bool:
    """`out.loss` where the loop makes `out` or its loss; not `args.aux_loss`, and not `args.loss_weight`."""
    text = ast.unparse(part)
    return part.attr.lower().endswith("loss") and (text in made or text.partition(".")[0] in made)


def _is_asking(test: ast.expr) -> bool:
    """Whether it may be another answer on another rank: a comparison of numbers, `isnan`; not `is None`."""
    if any(last_name(call.func) in _ASKING for call in nodes_in(test, ast.Call)):
        return True
    if isinstance(test, ast.Name):
        return True
    orders = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq)
    return any(isinstance(op, orders) for compare in nodes_in(test, ast.Compare) for op in compare.ops)


def _is_shared_before(program: Program, test: ast.expr, loop: Loop) -> bool:
    """Whether ranks tell each other something earlier in the loop: it may be about this."""
    for _, chain in collectives_in(program, loop):
        if end_position(chain[0]) <= position(test):
            return True
    calls = [call for call in nodes_in(loop, ast.Call) if position(call) <= end_position(test)]
    return any(word in last_name(call.func).lower() for call in calls for word in _SHARING_WORDS)


def _loss_behind(program: Program, asked: ast.Name | ast.Attribute, losses: set[str], depth: int = 0) -> str:
    if (text := ast.unparse(asked)) in losses:
        return text
    if isinstance(asked, ast.Attribute) or depth == DEEPEST:
        return ""
    for value in program.assigned(asked):
        inner = _kept(value)
        if isinstance(inner, ast.Name | ast.Attribute) and (found := _loss_behind(program, inner, losses, depth + 1)):
            return found
    return ""


def _kept(value: ast.expr) -> ast.expr:
    """What is behind `.item()`, `float(...)`, `torch.isnan(...)`, `not`."""
    while True:
        if isinstance(value, ast.UnaryOp):
            value = value.operand
        elif isinstance(value, ast.Call) and last_name(value.func) in (*_KEEPING, *_ASKING):
            is_method = isinstance(value.func, ast.Attribute) and not value.args
            inner = value.func.value if is_method and isinstance(value.func, ast.Attribute) else None
            value = inner or (value.args[0] if value.args else ast.Constant(None))
        elif isinstance(value, ast.Attribute) and value.attr in _KEEPING:
            value = value.value
        else:
            return value


def is_joined(node: ast.AST) -> bool:
    """Whether it is in `with model.join():`, where ranks may stop early."""
    for outer in ancestors(node):
        if isinstance(outer, ast.With):
            for item in outer.items:
                called = item.context_expr
                if isinstance(called, ast.Call) and last_name(called.func).lower() == "join":
                    return True
    return False


def loop_around(node: ast.AST) -> Loop | None:
    for outer in ancestors(node):
        if isinstance(outer, LOOPS):
            return outer
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
    return None
