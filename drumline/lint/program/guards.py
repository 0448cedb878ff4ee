"""On which ranks a place of the code is reached: conditions around it, early exits before it, and how it is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program import ranks
from drumline.lint.program.program import Program
from drumline.lint.program.tree import FUNCTIONS, above, function_around, inside, last_name, up
from drumline.lint.program.value import RankTest

Guards = frozenset[RankTest]
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
ENDING_CALLS = ("exit", "sys.exit", "os._exit", "quit")
DEEPEST = 8
_GUARDING_DECORATORS = (
    "rank_zero",
    "rank0",
    "main_process",
    "master_only",
    "main_only",
    "main_rank",
    "is_main",
)


def guards(program: Program, node: ast.AST, depth: int = 0) -> Guards:
    """The conditions on ranks under which it is reached; none: every rank comes here, as far as is known."""
    found = set(guards_within(program, node))
    function = function_around(node)
    if function is None or found or depth > DEEPEST:
        return frozenset(found)
    if any(_is_guarding(one) for one in function.decorator_list):
        return frozenset({RankTest("global", True)})
    callers = [call for call in program.callers(function) if function_around(call) is not function]
    by_caller = [guards(program, call, depth + 1) for call in callers]
    if by_caller and all(by_caller):
        return frozenset(by_caller[0])
    return frozenset(found)


def guards_within(program: Program, node: ast.AST) -> Iterator[RankTest]:
    """Those in the function that it is in."""
    for test, holds in conditions(program, node):
        yield from rank_tests(program, test, holds)


def rank_tests(program: Program, test: ast.expr, holds: bool = True) -> list[RankTest]:
    """What a condition says of the rank, if it holds or if it does not; `if rank:` asks for the others."""
    values = program.values(test)
    as_test = values if holds else ranks.flipped(values)
    if holds and not any(isinstance(value, RankTest) for value in values):
        as_test = ranks.flipped(ranks.flipped(values))
    return [value for value in as_test if isinstance(value, RankTest)]


def conditions(program: Program, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """All that is known to hold, or not to, when this place of its function is reached."""
    inner: ast.AST = node
    for outer in above(node):
        if isinstance(outer, ast.If | ast.While) and inner is not outer.test:
            if inner in outer.body:
                yield outer.test, True
            elif isinstance(outer, ast.If):
                yield outer.test, False
        elif isinstance(outer, ast.IfExp) and inner is not outer.test:
            yield outer.test, inner is outer.body
        elif isinstance(outer, ast.BoolOp) and isinstance(inner, ast.expr):
            for earlier in outer.values[: outer.values.index(inner)]:
                yield earlier, isinstance(outer.op, ast.And)
        if isinstance(inner, ast.stmt):
            yield from _left_before(program, outer, inner)
        if isinstance(outer, FUNCTIONS):
            return
        inner = outer


def _left_before(program: Program, block: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """After `if rank != 0: return` the rest of the block is for rank 0."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if isinstance(statements, list) and statement in statements:
            for earlier in statements[: statements.index(statement)]:
                if isinstance(earlier, ast.If) and leaves(program, earlier.body) and not earlier.orelse:
                    yield earlier.test, False


def leaves(program: Program, block: list[ast.stmt]) -> bool:
    """Whether nothing after this block is reached from it."""
    last = block[-1]
    if isinstance(last, EXITS):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return program.name_of(last.value.func) in ENDING_CALLS
    return (
        isinstance(last, ast.If)
        and bool(last.orelse)
        and leaves(program, last.body)
        and leaves(program, last.orelse)
    )


def is_on_main_only(program: Program, node: ast.AST) -> bool:
    """Whether one process of the whole job comes here, and no other."""
    return any(test.is_main and test.kind != "local" for test in guards(program, node))


def is_on_some_only(program: Program, node: ast.AST) -> bool:
    """Whether some ranks come here and others do not."""
    return bool(guards(program, node))


def is_now_and_then(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Whether something between it and an outer node lets it happen only sometimes: `if step % 100 == 0`."""
    inner: ast.AST = node
    for outer in above(node):
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test and _is_sometimes(outer.test):
            return True
        if outer is until:
            return False
        if isinstance(inner, ast.stmt):
            before = _left_before(program, outer, inner)
            if any(_is_sometimes(test) for test, _ in before):
                return True
        inner = outer
    return False


def _is_sometimes(test: ast.expr) -> bool:
    """A remainder, a comparison of steps or times, or a flag that is computed from one; not `if train:`."""
    if any(isinstance(one.op, ast.Mod) for one in inside(test, ast.BinOp)):
        return True
    words = {last_name(one).lower() for one in inside(test, ast.Name, ast.Attribute)}
    return any(part in word for word in words for part in _SOMETIMES)


_SOMETIMES = (
    "log",
    "report",
    "print",
    "verbose",
    "debug",
    "every",
    "interval",
    "is_last",
    "should",
    "sync",
    "time",
    "boundary",
)


def _is_guarding(decorator: ast.expr) -> bool:
    name = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator).lower()
    return any(part in name for part in _GUARDING_DECORATORS)


def exit_of(node: ast.AST) -> ast.AST | None:
    """The function, loop or module that a `return`, `break` or `continue` leaves or shortens."""
    current = up(node)
    kinds = FUNCTIONS if isinstance(node, ast.Return) else (ast.For, ast.AsyncFor, ast.While)
    while current is not None and not isinstance(current, kinds):
        current = up(current)
    return current
