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
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# Conditions on ranks.


def rank_tests_at(
    program: Program, node: ast.AST, *, with_exits: bool = True
) -> Iterator[RankTest]:
    """The conditions on ranks around it, in its function.

    if dist.get_rank() == 0:
        torch.save(state, path)  # the rank is 0
    """
    for test, holds in conditions(program, node, with_exits=with_exits):
        yield from rank_tests(program, test, holds)

    for outer in ancestors(node):
        if isinstance(outer, _FUNCTIONS):
            return
        if isinstance(outer, ast.With):
            yield from (_FIRST for item in outer.items if _is_for_first(item.context_expr))


# In `with main_process_first():` all ranks enter, the others after the first.
_FIRST = RankTest("global", True, is_needed=False)


def _is_for_first(manager: ast.expr) -> bool:
    """Whether it is such a context manager: `main_process_first()`."""
    return isinstance(manager, ast.Call) and called_name(manager).endswith("_first")


def rank_tests(program: Program, test: ast.expr, holds: bool = True) -> list[RankTest]:
    """The tests of the rank in a condition that holds, or does not.

    `if rank:` selects all but rank 0.
    """
    if _asks_for_other(test):
        return []

    values = program.values(test)
    as_test = values if holds else ranks.negated(values)
    if holds and not any(isinstance(value, RankTest) for value in values):
        as_test = ranks.negated(ranks.negated(values))

    return [value for value in as_test if isinstance(value, RankTest)]


def _asks_for_other(test: ast.expr) -> bool:
    """Whether a condition is not about a number.

    Examples: `x is None`, `mode == "train"`, and `if config.gpu:`, whether there is a GPU.
    """
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and _is_no_number(test.comparators[0])

    name = test.operand if isinstance(test, ast.UnaryOp) else test
    return isinstance(name, (ast.Name, ast.Attribute)) and last_name(name) in ("gpu", "gpu_id")


def _is_no_number(expression: ast.expr) -> bool:
    """Whether it is a constant such as `None` and `"train"`; `0` and `"0"` are numbers."""
    if not isinstance(expression, ast.Constant):
        return False

    value = expression.value
    return not isinstance(value, int) and not str(value).isdecimal()


# Flags for debugging.


def names_option(written: str) -> bool:
    """Whether a text of code has an option in it: `args.resume`."""
    return _OPTION.search(written) is not None


def asks_for_debugging(test: ast.expr) -> bool:
    """Whether it is a flag such as `args.debug` or `DEBUG`.

    What is wrong there is so in a run that looks for something else.
    """
    name = last_name(test)
    if _DEBUGGING.fullmatch(name.lower()) is None:
        return False

    is_constant = isinstance(test, ast.Name) and name.isupper()
    return is_constant or names_option(ast.unparse(test).lower())


def is_for_debugging(program: Program, node: ast.AST) -> bool:
    """Whether such a flag is needed to come there.

    if args.debug:
        print(loss.item())
    """
    for test, holds in conditions(program, node, with_exits=False):
        for part, part_holds in split_condition(test, holds):
            if part_holds and asks_for_debugging(part):
                return True

    return False


# The conditions at a place.


def conditions(
    program: Program, node: ast.AST, *, with_exits: bool = True
) -> Iterator[tuple[ast.expr, bool]]:
    """All conditions that are known to hold, or not, at this place of its function.

    The innermost come first: `(b, False)` and then `(a, True)` at `f()` in

    if a:
        if b:
            return
        f()
    """
    inner: ast.AST = node

    for outer in ancestors(node):
        yield from _conditions_within(outer, inner)
        if isinstance(inner, ast.stmt) and with_exits:
            yield from early_exits_before(program, inner)

        if isinstance(outer, _FUNCTIONS):
            return
        inner = outer


def _conditions_within(outer: ast.AST, inner: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """What a statement or an expression asks before it comes to this child of it.

    Examples: `a` of `if a:` for its body, of `f() if a else g()` for both branches, of `a and f()`
    for `f()`, and of `[f(x) for x in xs if a]` for `f(x)`.
    """
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
        for generator in outer.generators:
            yield from ((test, True) for test in generator.ifs)


def is_dead(program: Program, node: ast.AST) -> bool:
    """Whether a constant keeps it from being run.

    USE_DDP = False
    if USE_DDP:
        model = DistributedDataParallel(model)
    """
    for test, holds in conditions(program, node, with_exits=False):
        if isinstance(test, ast.Name) and program.values(test) == {ConstantValue(not holds)}:
            return True

    return False


def held_conditions(program: Program, node: ast.AST) -> list[tuple[ast.expr, bool]]:
    """The conditions at a place, each in its parts: `a` and `b` under `if a and b:`."""
    held = conditions(program, node)
    return [part for test, holds in held for part in split_condition(test, holds)]


def split_condition(test: ast.expr, holds: bool) -> list[tuple[ast.expr, bool]]:
    """If `a and b` holds, both do; if `a or b` does not, neither does."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return split_condition(test.operand, not holds)

    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        return [part for operand in test.values for part in split_condition(operand, holds)]

    return [(test, holds)]


# Early exits.


def early_exits_before(program: Program, statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """What the statements before it in its block have asked, and whether it holds.

    if rank != 0:
        return
    torch.save(state, path)  # `rank != 0` does not hold
    """
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
    """The conditions that are decided after a statement, since it ends the block otherwise.

    Those within `with` and `if dist.is_initialized():` count as well, which all ranks enter.
    """
    is_entered = isinstance(statement, ast.With)

    if isinstance(statement, ast.If):
        others_end = always_exits(program, statement.orelse)
        if always_exits(program, statement.body) != others_end:
            yield statement.test, others_end
        elif not statement.orelse and ranks.is_about_being_distributed(statement.test):
            is_entered = not rank_tests(program, statement.test)

    if is_entered:
        for inner in getattr(statement, "body", ()):
            yield from _passed(program, inner)


def always_exits(program: Program, block: list[ast.stmt]) -> bool:
    """Whether nothing after this block is reached from it: its last statement is `return`,
    `sys.exit()`, or an `if` whose branches both exit."""
    if not block:
        return False

    last = block[-1]
    if isinstance(last, EXITS):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return program.name_of(last.value.func) in ENDING_CALLS
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return always_exits(program, last.body)
    if isinstance(last, ast.If):
        return always_exits(program, last.body) and always_exits(program, last.orelse)

    return False


def rest_of_block(statement: ast.stmt) -> list[ast.stmt]:
    """The statements after it in its block."""
    block = block_of(statement)
    return block[block.index(statement) + 1 :] if block else []


# Two places.


def are_exclusive(program: Program, first: ast.AST, second: ast.AST) -> bool:
    """Whether never both are run: they are in two cases of a `match`, or one runs if a condition
    holds, and the other if it does not."""
    if _are_in_two_cases(first, second):
        return True

    held = {_plain(test, holds) for test, holds in _known(program, first)}
    excluded = {_plain(test, not holds) for test, holds in _known(program, second)}
    return not held.isdisjoint(excluded)


def _are_in_two_cases(first: ast.AST, second: ast.AST) -> bool:
    """Whether a `match` comes to one of them in a case, and to the other in another."""
    for case in _cases_of(first):
        for other_case in _cases_of(second):
            if case is not other_case and parent_of(case) is parent_of(other_case):
                return True

    return False


def _cases_of(node: ast.AST) -> list[ast.match_case]:
    """The cases of `match` statements around it."""
    return [outer for outer in ancestors(node) if isinstance(outer, ast.match_case)]


def _known(program: Program, node: ast.AST) -> list[tuple[ast.expr, bool]]:
    """The conditions at a place as a whole, and their parts."""
    return [*conditions(program, node), *held_conditions(program, node)]


def _plain(test: ast.expr, holds: bool) -> tuple[str, bool]:
    """A condition in one form, to compare it: `x is None` does not hold where `x is not None` does,
    nor `x` where `not x` does."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
        holds = not holds

    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        is_negated = isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
        if is_negated or isinstance(test.ops[0], (ast.Is, ast.Eq)):
            sides = f"{ast.dump(test.left)} {ast.dump(test.comparators[0])}"
            return sides, holds != is_negated

    return ast.dump(test), holds
