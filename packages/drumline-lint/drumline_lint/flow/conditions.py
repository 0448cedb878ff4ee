"""The conditions that hold at a place of a function: those around it, and early exits before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.program import ranks
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import ancestors, block_of, called_name, last_name, parent_of
from drumline_lint.program.value import ConstantValue, RankTest

EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_OPTION = re.compile(r"(^|\W)(args|opts?|cfg|config|options|flags|hparams|params|self\.config)\b")
_DEBUGGING = re.compile(
    r"((is|do|use|run|enable|only)_)?"
    r"(debug(ging)?|dry_?run|test|profil(e|er|ing)|inspect|(eval|validate)_only)(_(mode|run|only))?"
)
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
    if _asks_for_other(test):
        return []
    values = program.values(test)
    as_test = values if holds else ranks.negated(values)
    if holds and not any(isinstance(value, RankTest) for value in values):
        as_test = ranks.negated(ranks.negated(values))
    return [value for value in as_test if isinstance(value, RankTest)]


def _asks_for_other(test: ast.expr) -> bool:
    """`x is None`, `mode == "train"`; and `if config.gpu:`, whether there is a GPU."""
    if isinstance(test, ast.Compare):
        value = test.comparators[0]
        is_constant = isinstance(value, ast.Constant) and len(test.ops) == 1
        number = value.value if isinstance(value, ast.Constant) else None
        is_number = isinstance(number, int) or str(number).isdecimal()
        return is_constant and not is_number
    name = test.operand if isinstance(test, ast.UnaryOp) else test
    return isinstance(name, (ast.Name, ast.Attribute)) and last_name(name) in ("gpu", "gpu_id")


def names_option(written: str) -> bool:
    return _OPTION.search(written) is not None


def asks_for_debugging(test: ast.expr) -> bool:
    """Whether it is a flag such as `args.debug` or `DEBUG`: what is wrong there is so in a run that
    looks for something else."""
    name = last_name(test)
    is_constant = isinstance(test, ast.Name) and name.isupper()
    is_flag = is_constant or (bool(name) and names_option(ast.unparse(test).lower()))
    return is_flag and _DEBUGGING.fullmatch(name.lower()) is not None


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


def is_dead(program: Program, node: ast.AST) -> bool:
    """Whether a constant keeps it from being run: `USE_DDP = False`."""
    return any(
        isinstance(test, ast.Name) and program.values(test) == {ConstantValue(not holds)}
        for test, holds in conditions(program, node, with_exits=False)
    )


def held_conditions(program: Program, node: ast.AST) -> list[tuple[ast.expr, bool]]:
    held = conditions(program, node)
    return [part for test, holds in held for part in split_condition(test, holds)]


def split_condition(test: ast.expr, holds: bool) -> list[tuple[ast.expr, bool]]:
    """If `a and b` holds, both do; if `a or b` does not, neither does."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return split_condition(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        return [part for operand in test.values for part in split_condition(operand, holds)]
    return [(test, holds)]


def is_for_debugging(program: Program, node: ast.AST) -> bool:
    held = conditions(program, node, with_exits=False)
    parts = [part for test, holds in held for part in split_condition(test, holds)]
    return any(asks_for_debugging(test) for test, holds in parts if holds)


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
    is_entered = isinstance(statement, ast.With)
    if isinstance(statement, ast.If):
        others_end = always_exits(program, statement.orelse)
        if always_exits(program, statement.body) != others_end:
            yield statement.test, others_end
        elif not statement.orelse and ranks.is_about_being_distributed(statement.test):
            is_entered = not rank_tests(program, statement.test)  # `if dist.is_initialized():`
    for inner in getattr(statement, "body", ()) if is_entered else ():
        yield from _passed(program, inner)


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
    return isinstance(manager, ast.Call) and called_name(manager).endswith("_first")


def are_exclusive(program: Program, first: ast.AST, second: ast.AST) -> bool:
    """Whether one runs if a condition holds, and the other if it does not."""
    if any(
        case is not other_case and parent_of(case) is parent_of(other_case)
        for case in _cases_of(first)
        for other_case in _cases_of(second)
    ):
        return True
    held = {_plain(test, holds) for test, holds in _known(program, first)}
    excluded = {_plain(test, not holds) for test, holds in _known(program, second)}
    return not held.isdisjoint(excluded)


def _cases_of(node: ast.AST) -> list[ast.match_case]:
    return [outer for outer in ancestors(node) if isinstance(outer, ast.match_case)]


def _known(program: Program, node: ast.AST) -> list[tuple[ast.expr, bool]]:
    """As a whole, and their parts."""
    return [*conditions(program, node), *held_conditions(program, node)]


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
