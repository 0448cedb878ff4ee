"""Code that is not reached as a repository is shipped: conditions on options keep it from being run,
with the values that the launches shown there give them, or by default; or it is for Ctrl-C."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drumline_lint.flow.conditions import conditions, held_conditions
from drumline_lint.flow.option_values import UNKNOWN, is_holder, of_yaml, option_of, option_values
from drumline_lint.flow.shown_runs import ShownRun, shown_runs
from drumline_lint.program.calls import argument, default_of, has_unknown_arguments, number_of
from drumline_lint.program.functions import function_with
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import previous_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    dotted,
    enclosing_class,
    enclosing_function,
    owner_of,
)
from drumline_lint.program.value import CallResult, Instance, Library
from drumline_lint.reading.source import Source

_DEEPEST = 8
_DEEPEST_CALL = 3
_ASKS_FOR_FILE = ("exists", "isfile", "isdir")
_SOME_OBJECT = object()
"""What a class makes: neither None nor false."""
_COMPARED: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Is: lambda left, right: left == right,
    ast.IsNot: lambda left, right: left != right,
    ast.Lt: lambda left, right: left < right,  # type: ignore[operator]
    ast.LtE: lambda left, right: left <= right,  # type: ignore[operator]
    ast.Gt: lambda left, right: left > right,  # type: ignore[operator]
    ast.GtE: lambda left, right: left >= right,  # type: ignore[operator]
    ast.In: lambda left, right: left in right,  # type: ignore[operator]
    ast.NotIn: lambda left, right: left not in right,  # type: ignore[operator]
}
_CONVERTING: dict[str, Callable[[object], object]] = {
    "bool": bool,
    "int": lambda value: int(value),  # type: ignore[call-overload]
    "float": lambda value: float(value),  # type: ignore[arg-type]
    "str": str,
    "str2bool": lambda value: of_yaml(str(value)),
}
_OTHER_NAMES = {"torch.half": "torch.float16", "torch.float": "torch.float32"}


@dataclass(frozen=True)
class Outcome:
    """All that an expression may be in a run."""

    values: tuple[object, ...] = (UNKNOWN,)
    is_of_options: bool = False
    """Whether an option decides; what only constants decide was written so that it is."""

    def truth(self) -> bool | None:
        """Whether it holds, if all values agree."""
        answers = {None if value is UNKNOWN else bool(value) for value in self.values}
        return answers.pop() if len(answers) == 1 else None


_ANYTHING = Outcome()


def is_line_left_out(program: Program, source: Source, line: int) -> bool:
    """Whether what begins on a line is not reached, unless a user asks for it."""
    around = [
        statement
        for kind, nodes in program.index(source).nodes.items()
        if issubclass(kind, ast.stmt)
        for statement in nodes
        if statement.lineno <= line <= (statement.end_lineno or line)
    ]
    innermost = max(around, key=lambda statement: statement.lineno, default=None)
    return innermost is not None and is_left_out(program, innermost)


def is_left_out(program: Program, node: ast.AST) -> bool:
    """Whether no run that is shown reaches it; where none is, no run with the defaults."""
    if _is_for_interrupt(node):
        return True
    runs = _runs(program, program.source_of(node))
    return all(_is_kept_out(program, node, run, _DEEPEST_CALL) for run in runs)


def is_reached_in_every_run(program: Program, node: ast.AST) -> bool:
    """Whether the conditions around it in its function hold in every run that is shown."""
    runs = shown_runs(program, program.source_of(node))
    tests = list(conditions(program, node, with_exits=False))
    return bool(runs) and all(
        _outcome(program, test, run, _DEEPEST).truth() is holds
        for run in runs
        for test, holds in tests
    )


def _runs(program: Program, source: Source) -> Sequence[ShownRun | None]:
    return shown_runs(program, source) or [None]


def _is_for_interrupt(node: ast.AST) -> bool:
    """`except KeyboardInterrupt:`"""
    return any(
        isinstance(outer, ast.ExceptHandler)
        and outer.type is not None
        and ast.unparse(outer.type) == "KeyboardInterrupt"
        for outer in ancestors(node)
    )


def _is_kept_out(program: Program, node: ast.AST, run: ShownRun | None, depth: int) -> bool:
    """Whether an option keeps it from being run, or all calls that lead to it."""
    if _contradicts(program, node, run, _DEEPEST):
        return True
    function = enclosing_function(node)
    calls = program.callers(function) if function is not None and depth > 0 else []
    return bool(calls) and all(
        _is_for_interrupt(call) or _is_kept_out(program, call, run, depth - 1) for call in calls
    )


def _contradicts(program: Program, node: ast.AST, run: ShownRun | None, depth: int) -> bool:
    """Whether a condition on the way to it in its function is another than the one that holds."""
    for test, holds in held_conditions(program, node):
        outcome = _outcome(program, test, run, depth)
        if outcome.is_of_options and outcome.truth() is (not holds):
            return True
    return False


# What an expression is in a run.


def _outcome(program: Program, expression: ast.expr, run: ShownRun | None, depth: int) -> Outcome:
    """A query for the same within itself gets an unknown value."""
    answers = program.answers[_outcome]
    key = (expression, run)
    if depth == 0:
        return _ANYTHING
    if key not in answers:
        answers[key] = _ANYTHING
        answers[key] = _evaluate(program, expression, run, depth - 1)
    outcome: Outcome = answers[key]
    return outcome


def _evaluate(program: Program, expression: ast.expr, run: ShownRun | None, depth: int) -> Outcome:
    def inner(part: ast.expr) -> Outcome:
        return _outcome(program, part, run, depth)

    if isinstance(expression, ast.Constant):
        return Outcome((expression.value,))
    if isinstance(expression, ast.Call) and called_name(expression) == "hasattr":
        return _has_option(program, expression, run, depth)
    if name := option_of(expression):
        return _of_option(program, expression, name, run, depth)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return _mapped(inner(expression.operand), lambda value: not value)
    if isinstance(expression, ast.Compare):
        return _of_comparison(expression, inner)
    if isinstance(expression, ast.BoolOp):
        return _of_bool_op(expression, inner)
    if isinstance(expression, ast.IfExp):
        return _of_branches(expression, inner)
    if isinstance(expression, (ast.Tuple, ast.List, ast.Set)):
        return _of_items([inner(item) for item in expression.elts])
    if isinstance(expression, ast.Call):
        return _of_call(program, expression, inner)
    if isinstance(expression, (ast.Name, ast.Attribute)):
        return _of_name(program, expression, run, depth)
    return _ANYTHING


def _mapped(outcome: Outcome, function: Callable[[object], object]) -> Outcome:
    def changed(value: object) -> object:
        if value is UNKNOWN:
            return UNKNOWN
        try:
            return function(value)
        except (TypeError, ValueError):
            return UNKNOWN

    return Outcome(tuple(map(changed, outcome.values)), outcome.is_of_options)


def _united(outcomes: Iterable[Outcome], is_of_options: bool = False) -> Outcome:
    every = list(outcomes)
    values = tuple(value for outcome in every for value in outcome.values)
    is_decided = is_of_options or any(outcome.is_of_options for outcome in every)
    return Outcome(values or (UNKNOWN,), is_decided)


def _of_comparison(test: ast.Compare, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    if len(test.ops) > 1:
        return _ANYTHING
    left = inner(test.left)
    right = inner(test.comparators[0])
    answers = [
        _compared(test.ops[0], first, second) for first in left.values for second in right.values
    ]
    return Outcome(tuple(answers), left.is_of_options or right.is_of_options)


def _compared(operator: ast.cmpop, left: object, right: object) -> object:
    """Of an object that a class makes, only that it is not None is known."""
    compare = _COMPARED.get(type(operator))
    is_object = left is _SOME_OBJECT or right is _SOME_OBJECT
    is_about_none = left is None or right is None
    if compare is None or left is UNKNOWN or right is UNKNOWN or (is_object and not is_about_none):
        return UNKNOWN
    try:
        return compare(left, right)
    except TypeError:
        return UNKNOWN


def _of_bool_op(expression: ast.BoolOp, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    """`a and b` is false if one of them is; `a or b` is true if one is."""
    is_and = isinstance(expression.op, ast.And)
    outcomes = [inner(part) for part in expression.values]
    for outcome in outcomes:
        if outcome.truth() is (not is_and):
            return outcome
    if all(outcome.truth() is is_and for outcome in outcomes):
        return _united(outcomes)
    left = [outcome for outcome in outcomes if outcome.truth() is not is_and]
    return left[0] if len(left) == 1 else _ANYTHING


def _of_branches(expression: ast.IfExp, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    test = inner(expression.test)
    if test.truth() is None:
        return _united([inner(expression.body), inner(expression.orelse)])
    taken = inner(expression.body if test.truth() else expression.orelse)
    return _united([taken], test.is_of_options)


def _of_items(items: list[Outcome]) -> Outcome:
    if any(len(item.values) != 1 or item.values[0] is UNKNOWN for item in items):
        return _ANYTHING
    return Outcome((tuple(item.values[0] for item in items),))


def _of_call(program: Program, call: ast.Call, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    name = called_name(call)
    if name in _ASKS_FOR_FILE and call.args:  # a file that is named by default may be there
        return _mapped(inner(call.args[0]), lambda value: UNKNOWN if value else False)
    if name in _CONVERTING and len(call.args) == 1 and owner_of(call) is None:
        return _mapped(inner(call.args[0]), _CONVERTING[name])
    is_made = name[:1].isupper() and any(
        isinstance(value, (CallResult, Instance)) for value in program.values(call)
    )
    return Outcome((_SOME_OBJECT,)) if is_made else _ANYTHING


# Options, and names that have their values.


def _of_option(
    program: Program, expression: ast.expr, name: str, run: ShownRun | None, depth: int
) -> Outcome:
    """What it is given or has by default, and what the code sets it to in this run."""
    source = program.source_of(expression)
    values = option_values(program, source, name, run)
    assigned = [
        _outcome(program, value, run, depth) if value is not None else _ANYTHING
        for value in _assigned_in(program, source, name, run, depth)
    ]
    outcome = _united([Outcome(tuple(values)), *assigned] if values else assigned)
    return Outcome(outcome.values, is_of_options=bool(values) or outcome.is_of_options)


def _has_option(program: Program, call: ast.Call, run: ShownRun | None, depth: int) -> Outcome:
    """`hasattr(config, "data")`: false if only code that is left out sets it."""
    name = option_of(call)
    source = program.source_of(call)
    if (
        not name
        or option_values(program, source, name, run)
        or not _assignments(program, source, name)
    ):
        return _ANYTHING
    is_set = bool(_assigned_in(program, source, name, run, depth))
    return _ANYTHING if is_set else Outcome((False,), is_of_options=True)


def _assigned_in(
    program: Program, source: Source, name: str, run: ShownRun | None, depth: int
) -> list[ast.expr | None]:
    """The values of `args.name = value`, but for those that the run does not come to."""
    return [
        value
        for target, value in _assignments(program, source, name)
        if not _contradicts(program, target, run, depth)
    ]


@cached_query
def _assignments(
    program: Program, source: Source, name: str
) -> list[tuple[ast.Attribute, ast.expr | None]]:
    return [
        (target, None if binding.path else binding.value)
        for file in connected(program, source)
        for target, binding in program.index(file).attributes.get(name, ())
        if is_holder(target.value)
    ]


def _of_name(
    program: Program, expression: ast.Name | ast.Attribute, run: ShownRun | None, depth: int
) -> Outcome:
    """From the values that are assigned to it, or given for a parameter, in this run."""
    names = {value.name for value in program.values(expression) if isinstance(value, Library)}
    if isinstance(expression, ast.Attribute) and len(names) == 1:
        name = names.pop()
        return Outcome((_OTHER_NAMES.get(name, name),))
    origins = _origins(program, expression)
    reached = [
        origin
        for origin in origins
        if origin is None or not _contradicts(program, origin, run, depth)
    ]
    outcomes = [
        _outcome(program, origin, run, depth) if origin is not None else _ANYTHING
        for origin in reached
    ]
    return _united(outcomes, is_of_options=len(reached) < len(origins))


def _origins(program: Program, expression: ast.Name | ast.Attribute) -> Sequence[ast.expr | None]:
    if isinstance(expression, ast.Attribute):
        is_changed = _is_set_from_outside(program, expression)
        return [*previous_values(program, expression), *([None] if is_changed else [])]
    origins = list(previous_values(program, expression))
    if origins == [None]:
        bindings = program.bindings(expression)
        parameters = [each.node for each in bindings if isinstance(each.node, ast.arg)]
        origins = [value for each in parameters for value in _from_subclasses(program, each)]
    return origins or [None]


def _is_set_from_outside(program: Program, expression: ast.Attribute) -> bool:
    """`trainer.model = net`, for `self.model`"""
    return any(
        dotted(target.value) not in ("self", dotted(expression.value))
        for file in connected(program, program.source_of(expression))
        for target, _ in program.index(file).attributes.get(expression.attr, ())
    )


def _from_subclasses(program: Program, parameter: ast.arg) -> list[ast.expr | None]:
    """What `super().__init__(...)` gives for a parameter of the `__init__` of a class."""
    function = function_with(parameter)
    owner = enclosing_class(function) if function is not None else None
    if function is None or owner is None or function.name != "__init__":
        return []
    arguments: list[ast.expr | None] = []
    for source in program.files.calling.get("__init__", ()):
        for call in program.index(source).calls["__init__"]:
            if owner in _bases_of_caller(program, call):
                value = argument(call, number_of(function, parameter), parameter.arg)
                left_out = None if has_unknown_arguments(call) else default_of(function, parameter)
                arguments.append(value or left_out)
    return arguments


def _bases_of_caller(program: Program, call: ast.Call) -> Sequence[ast.ClassDef | str]:
    """Of `super().__init__()`, the classes that its own class is derived from."""
    called_on = owner_of(call)
    is_of_super = isinstance(called_on, ast.Call) and called_name(called_on) == "super"
    function = enclosing_function(call)
    inheriting = enclosing_class(function) if is_of_super and function is not None else None
    return program.ancestry(inheriting)[1:] if inheriting is not None else []
