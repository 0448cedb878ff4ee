"""The conditions that hold at a place of a function: those around it, and early exits before it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from drumline_lint.program import ranks
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query, recursive_query
from drumline_lint.program.tree import ancestors, block_of, last_name, nodes_in
from drumline_lint.program.value import NOTHING, Rank, RankTest, Value, Values


def is_joined(test: ast.expr) -> bool:
    return isinstance(test, ast.BoolOp) or (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    )


def decided(test: ast.expr, value_of: Callable[[ast.expr], bool | None]) -> bool | None:
    """The value of a condition from the values of its parts; None if unknown."""
    if isinstance(test, ast.UnaryOp):
        inner = value_of(test.operand)
        return None if inner is None else not inner
    parts = {value_of(part) for part in test.values} if isinstance(test, ast.BoolOp) else {None}
    deciding = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)
    return deciding if deciding in parts else None if None in parts else not deciding


Conditions = Sequence[tuple[ast.expr, bool]]
"""Conditions, each with whether it holds."""
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
ENDING_CALLS = ("exit", "sys.exit", "os._exit", "quit")


def rank_tests_at(
    program: Program, node: ast.AST, *, with_exits: bool = True
) -> Iterator[RankTest]:
    """The conditions on ranks around it, in its function."""
    for test, holds in conditions(program, node, with_exits=with_exits):
        yield from rank_tests(program, test, holds)
    for outer in ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(outer, ast.With):
            yield from (_FIRST for item in outer.items if _is_for_first(item.context_expr))


def rank_tests(program: Program, test: ast.expr, holds: bool = True) -> list[RankTest]:
    """The tests of the rank in a condition that holds, or does not; `if rank:` selects all but rank
    0."""
    values = NOTHING if _is_number_of_gpu(test) else _asked(program, test)
    if not any(isinstance(value, (Rank, RankTest)) for value in values):
        values |= _of_optional(program, test)
    as_test = values if holds else ranks.negated(values)
    if holds and not any(isinstance(value, RankTest) for value in values):
        as_test = ranks.negated(ranks.negated(values))
    return [value for value in as_test if isinstance(value, RankTest)]


def _is_number_of_gpu(test: ast.expr) -> bool:
    """`if config.gpu:` asks whether there is a GPU, and not for its number."""
    name = test.operand if isinstance(test, ast.UnaryOp) else test
    is_name = isinstance(name, (ast.Name, ast.Attribute))
    return is_name and last_name(name) in ("gpu", "gpu_id")


def _of_optional(program: Program, test: ast.expr) -> Values:
    """`folder is not None`, if only some ranks have set it before."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        compared = test.comparators[0]
        is_none = isinstance(compared, ast.Constant) and compared.value is None
        values = _of_optional(program, test.left) if is_none else NOTHING
        return ranks.negated(values) if isinstance(test.ops[0], (ast.Is, ast.Eq)) else values
    return _tests_of_setting(program, test) if isinstance(test, ast.Name) else NOTHING


@recursive_query(NOTHING)
def _tests_of_setting(program: Program, name: ast.Name) -> Values:
    bindings = [binding for binding in program.bindings(name) if binding.kind == "assign"]
    is_empty = [
        isinstance(binding.value, ast.Constant) and not binding.value.value for binding in bindings
    ]
    if not any(is_empty) or all(is_empty) or len(bindings) < len(program.bindings(name)):
        return NOTHING
    nodes = [binding.node for binding, empty in zip(bindings, is_empty, strict=True) if not empty]
    every = [frozenset(rank_tests_at(program, node)) for node in nodes]
    return frozenset[Value]().union(*every) if all(every) else NOTHING


def _asked(program: Program, test: ast.expr) -> Values:
    values = program.values(test)
    is_known = any(isinstance(value, (Rank, RankTest)) for value in values)
    return values if is_known else values | _yielded(program, test)


def _yielded(program: Program, test: ast.expr) -> Values:
    """For `with first() as lead:`, the value that the generator `first` yields; for `lead and ...`,
    the same."""
    if isinstance(test, ast.BoolOp):
        operands = [_asked(program, operand) for operand in test.values]
        return ranks.combined(test, operands)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ranks.negated(_yielded(program, test.operand))
    bindings = program.bindings(test) if isinstance(test, ast.Name) else []
    calls = [
        binding.value
        for binding in bindings
        if binding.kind == "entered" and isinstance(binding.value, ast.Call)
    ]
    functions = [program.function_of(call) for call in calls]
    yielded = [
        statement.value
        for function in functions
        if function
        for statement in nodes_in(function, ast.Yield)
    ]
    return frozenset().union(*(program.values(value) for value in yielded))


def conditions(
    program: Program, node: ast.AST, *, with_exits: bool = True
) -> Iterator[tuple[ast.expr, bool]]:
    """All conditions that are known to hold, or not, at this place of its function; innermost
    first."""
    inner: ast.AST = node
    for outer in ancestors(node):
        if isinstance(outer, (ast.If, ast.While)) and inner is not outer.test:
            if inner in outer.body:
                yield outer.test, True
            elif isinstance(outer, ast.If):
                yield outer.test, False
        elif isinstance(outer, ast.IfExp) and inner is not outer.test:
            yield outer.test, inner is outer.body
        elif isinstance(outer, ast.BoolOp) and isinstance(inner, ast.expr):
            for earlier in outer.values[: outer.values.index(inner)]:
                yield earlier, isinstance(outer.op, ast.And)
        elif isinstance(outer, COMPREHENSIONS) and not isinstance(inner, ast.comprehension):
            yield from ((test, True) for each in outer.generators for test in each.ifs)
        if isinstance(inner, ast.stmt) and with_exits:
            yield from early_exits_before(program, inner)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        inner = outer


def held_conditions(
    program: Program, node: ast.AST, *, with_exits: bool = True
) -> list[tuple[ast.expr, bool]]:
    held = conditions(program, node, with_exits=with_exits)
    return [part for test, holds in held for part in split_condition(test, holds)]


def split_condition(test: ast.expr, holds: bool) -> list[tuple[ast.expr, bool]]:
    """If `a and b` holds, both do; if `a or b` does not, neither does."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return split_condition(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        return [part for operand in test.values for part in split_condition(operand, holds)]
    return [(test, holds)]


def early_exits_before(program: Program, statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """After `if rank != 0: return` the rest of the block is for rank 0."""
    block = block_of(statement)
    if not block:
        return
    place = block.index(statement)
    for number, test, holds in _exits_of_block(program, block[0]):
        if number >= place:
            return
        yield test, holds


@cached_query
def _exits_of_block(program: Program, first: ast.stmt) -> list[tuple[int, ast.expr, bool]]:
    """Of the block that begins with this statement: where each condition is asked, and whether it
    holds after it."""
    return [
        (number, test, holds)
        for number, statement in enumerate(block_of(first))
        for test, holds in _passed(program, statement)
    ]


def _passed(program: Program, statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        for inner in statement.body:
            yield from _passed(program, inner)
    if not isinstance(statement, ast.If):
        return
    ends = always_exits(program, statement.body)
    others_end = always_exits(program, statement.orelse)
    if ends != others_end:
        yield statement.test, others_end
    elif not ends and not statement.orelse and _is_always(program, statement.test):
        for inner in statement.body:
            yield from _passed(program, inner)


def _is_always(program: Program, test: ast.expr) -> bool:
    """Whether it always holds in distributed code: `if dist.is_initialized():`."""
    return _is_about_being_distributed(program, test) and not rank_tests(program, test)


@cached_query
def _is_about_being_distributed(program: Program, test: ast.expr) -> bool:
    """Each statement is asked about from every later one of its block."""
    return ranks.is_about_being_distributed(test)


def always_exits(program: Program, block: list[ast.stmt]) -> bool:
    """Whether nothing after this block is reached from it."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, EXITS):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return program.name_of(last.value.func) in ENDING_CALLS
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return always_exits(program, last.body)
    return (
        isinstance(last, ast.If)
        and always_exits(program, last.body)
        and always_exits(program, last.orelse)
    )


def rest_of_block(statement: ast.stmt) -> list[ast.stmt]:
    block = block_of(statement)
    return block[block.index(statement) + 1 :] if block else []


# In `with main_process_first():` all ranks enter, the others after the first.
_FIRST = RankTest("global", True, is_needed=False)


def _is_for_first(manager: ast.expr) -> bool:
    return isinstance(manager, ast.Call) and last_name(manager.func).endswith("_first")


def are_exclusive(
    program: Program, first: ast.AST, second: ast.AST, *, with_exits: bool = True
) -> bool:
    """Whether one runs if a condition holds, and the other if it does not."""
    held = _plain_conditions(program, first, with_exits)
    excluded = {(text, not holds) for text, holds in _plain_conditions(program, second, with_exits)}
    return not held.isdisjoint(excluded)


def _plain_conditions(program: Program, node: ast.AST, with_exits: bool) -> set[tuple[str, bool]]:
    """As a whole, and their parts: `a and b` in one branch, and neither known in the other."""
    whole = list(conditions(program, node, with_exits=with_exits))
    split = [part for test, holds in whole for part in split_condition(test, holds)]
    return {_plain(test, holds) for test, holds in (*whole, *split)}


def _plain(test: ast.expr, holds: bool) -> tuple[str, bool]:
    """Normalizes `not x` and `x is not None`: if they hold, `x` and `x is None` do not."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
        holds = not holds
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        turned = isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
        if turned or isinstance(test.ops[0], (ast.Is, ast.Eq)):
            return f"{ast.dump(test.left)} {ast.dump(test.comparators[0])}", holds != turned
    return ast.dump(test), holds
