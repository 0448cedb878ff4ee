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
    around: list[ast.stmt] = []
    for kind, nodes in program.index(source).nodes.items():
        if issubclass(kind, ast.stmt):
            around += [statement for statement in nodes if _has_line(statement, line)]

    innermost = max(around, key=lambda statement: statement.lineno, default=None)
    return innermost is not None and is_left_out(program, innermost)


def _has_line(statement: ast.stmt, line: int) -> bool:
    """Whether a line is one of a statement's."""
    return statement.lineno <= line <= (statement.end_lineno or line)


def is_left_out(program: Program, node: ast.AST) -> bool:
    """Whether no run that is shown reaches it; where none is, no run with the defaults.

    parser.add_argument("--amp", action="store_true")
    if args.amp:
        scaler.step(optimizer)  # left out, unless a script gives `--amp`
    """
    if _is_for_interrupt(node):
        return True

    runs: Sequence[ShownRun | None] = shown_runs(program, program.source_of(node)) or [None]
    return all(_is_kept_out(program, node, run, _DEEPEST_CALL) for run in runs)


def is_reached_in_every_run(program: Program, node: ast.AST) -> bool:
    """Whether the conditions around it in its function hold in every run that is shown."""
    runs = shown_runs(program, program.source_of(node))
    tests = list(conditions(program, node, with_exits=False))

    for run in runs:
        for test, holds in tests:
            if _outcome(program, test, run, _DEEPEST).truth() is not holds:
                return False

    return bool(runs)


def _is_for_interrupt(node: ast.AST) -> bool:
    """Whether it is run only at Ctrl-C: under `except KeyboardInterrupt:`."""
    for outer in ancestors(node):
        caught = outer.type if isinstance(outer, ast.ExceptHandler) else None
        if caught is not None and ast.unparse(caught) == "KeyboardInterrupt":
            return True

    return False


def _is_kept_out(program: Program, node: ast.AST, run: ShownRun | None, depth: int) -> bool:
    """Whether an option keeps it from being run, or all calls that lead to it."""
    if _contradicts(program, node, run, _DEEPEST):
        return True

    function = enclosing_function(node)
    if function is None or depth == 0:
        return False

    calls = program.callers(function)
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
    """What an expression may be in a run; a query for the same within itself gets an unknown
    value."""
    if depth == 0:
        return _ANYTHING

    answers = program.answers[_outcome]
    key = (expression, run)
    if key not in answers:
        answers[key] = _ANYTHING
        answers[key] = _evaluate(program, expression, run, depth - 1)

    outcome: Outcome = answers[key]
    return outcome


def _evaluate(program: Program, expression: ast.expr, run: ShownRun | None, depth: int) -> Outcome:
    """What an expression may be, from its parts and the options that it reads.

    With `--lr 0.1`, `args.lr > 1` is False, `args.lr or 1` is 0.1, and `(args.lr, 2)` is (0.1, 2).
    """

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
    """What a function makes of each value: `0.1` of `"0.1"`, for `float`."""

    def changed(value: object) -> object:
        if value is UNKNOWN:
            return UNKNOWN
        try:
            return function(value)
        except (TypeError, ValueError, OverflowError):
            return UNKNOWN

    return Outcome(tuple(map(changed, outcome.values)), outcome.is_of_options)


def _united(outcomes: Iterable[Outcome], is_of_options: bool = False) -> Outcome:
    """All that several outcomes may be; an option decides if it decides one of them."""
    values: list[object] = []
    for outcome in outcomes:
        values += outcome.values
        is_of_options = is_of_options or outcome.is_of_options

    return Outcome(tuple(values) or (UNKNOWN,), is_of_options)


def _of_comparison(test: ast.Compare, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    """`args.mode == "train"`, for each pair of values; a chain such as `0 < x < 3` may be
    anything."""
    if len(test.ops) > 1:
        return _ANYTHING

    left = inner(test.left)
    right = inner(test.comparators[0])
    answers: list[object] = []
    for first in left.values:
        answers += (_compared(test.ops[0], first, second) for second in right.values)

    return Outcome(tuple(answers), left.is_of_options or right.is_of_options)


def _compared(operator: ast.cmpop, left: object, right: object) -> object:
    """Of an object that a class makes, only that it is not None is known."""
    compare = _COMPARED.get(type(operator))
    if compare is None or left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN

    is_object = left is _SOME_OBJECT or right is _SOME_OBJECT
    is_about_none = left is None or right is None
    if is_object and not is_about_none:
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

    undecided = [outcome for outcome in outcomes if outcome.truth() is not is_and]
    if not undecided:
        return _united(outcomes)
    return undecided[0] if len(undecided) == 1 else _ANYTHING


def _of_branches(expression: ast.IfExp, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    """`"nccl" if args.gpu else "gloo"`: the branch that is taken, or both."""
    test = inner(expression.test)
    if test.truth() is None:
        return _united([inner(expression.body), inner(expression.orelse)])

    taken = inner(expression.body if test.truth() else expression.orelse)
    return _united([taken], test.is_of_options)


def _of_items(items: list[Outcome]) -> Outcome:
    """A list or tuple, if each of its items has one value."""
    if any(len(item.values) != 1 or item.values[0] is UNKNOWN for item in items):
        return _ANYTHING

    return Outcome((tuple(item.values[0] for item in items),))


def _of_call(program: Program, call: ast.Call, inner: Callable[[ast.expr], Outcome]) -> Outcome:
    """Known of calls are a question for a file, a conversion, and that a class makes an object.

    Examples: `os.path.exists(args.resume)`, `int(args.epochs)`, `Trainer(model)`.
    """
    name = called_name(call)
    if name in _ASKS_FOR_FILE and call.args:  # a file that is named by default may be there
        return _mapped(inner(call.args[0]), lambda value: UNKNOWN if value else False)
    if name in _CONVERTING and len(call.args) == 1 and owner_of(call) is None:
        return _mapped(inner(call.args[0]), _CONVERTING[name])
    if not name[:1].isupper():
        return _ANYTHING

    values = program.values(call)
    is_made = any(isinstance(value, (CallResult, Instance)) for value in values)
    return Outcome((_SOME_OBJECT,)) if is_made else _ANYTHING


# Options, and names that have their values.


def _of_option(
    program: Program, expression: ast.expr, name: str, run: ShownRun | None, depth: int
) -> Outcome:
    """What it is given or has by default, and what the code sets it to in this run."""
    source = program.source_of(expression)
    values = option_values(program, source, name, run)
    declared = [Outcome(tuple(values))] if values else []

    assigned_values = _assigned_in(program, source, name, run, depth)
    assigned = [_outcome_or_anything(program, value, run, depth) for value in assigned_values]

    return _united([*declared, *assigned], is_of_options=bool(values))


def _outcome_or_anything(
    program: Program, value: ast.expr | None, run: ShownRun | None, depth: int
) -> Outcome:
    """Of a value that is not known, anything."""
    return _ANYTHING if value is None else _outcome(program, value, run, depth)


def _has_option(program: Program, call: ast.Call, run: ShownRun | None, depth: int) -> Outcome:
    """`hasattr(config, "data")`: false if only code that is left out sets it."""
    name = option_of(call)
    source = program.source_of(call)
    if not name or option_values(program, source, name, run):
        return _ANYTHING

    is_ever_set = bool(_assignments(program, source, name))
    if not is_ever_set or _assigned_in(program, source, name, run, depth):
        return _ANYTHING

    return Outcome((False,), is_of_options=True)


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
    """All `args.name = value` of the files that are connected with one; of
    `args.a, args.b = pair()` the values are not known."""
    assignments: list[tuple[ast.Attribute, ast.expr | None]] = []

    for file in connected(program, source):
        for target, binding in program.index(file).attributes.get(name, ()):
            if is_holder(target.value):
                assignments.append((target, None if binding.path else binding.value))

    return assignments


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

    outcomes = [_outcome_or_anything(program, origin, run, depth) for origin in reached]
    return _united(outcomes, is_of_options=len(reached) < len(origins))


def _origins(program: Program, expression: ast.Name | ast.Attribute) -> Sequence[ast.expr | None]:
    """The values that are assigned to it; None is one that is not known."""
    origins = list(previous_values(program, expression))

    if isinstance(expression, ast.Attribute):
        is_changed = _is_set_from_outside(program, expression)
        return [*origins, None] if is_changed else origins

    if origins == [None]:
        origins = []
        for binding in program.bindings(expression):
            if isinstance(binding.node, ast.arg):
                origins += _from_subclasses(program, binding.node)

    return origins or [None]


def _is_set_from_outside(program: Program, expression: ast.Attribute) -> bool:
    """`trainer.model = net`, for `self.model`"""
    owners = ("self", dotted(expression.value))

    for file in connected(program, program.source_of(expression)):
        for target, _ in program.index(file).attributes.get(expression.attr, ()):
            if dotted(target.value) not in owners:
                return True

    return False


def _from_subclasses(program: Program, parameter: ast.arg) -> list[ast.expr | None]:
    """What `super().__init__(...)` gives for a parameter of the `__init__` of a class."""
    function = function_with(parameter)
    owner = enclosing_class(function) if function is not None else None
    if function is None or owner is None or function.name != "__init__":
        return []

    arguments: list[ast.expr | None] = []
    for source in program.files.calling.get("__init__", ()):
        for call in program.index(source).calls["__init__"]:
            if owner not in _bases_of_caller(program, call):
                continue

            value = argument(call, number_of(function, parameter), parameter.arg)
            left_out = None if has_unknown_arguments(call) else default_of(function, parameter)
            arguments.append(value or left_out)

    return arguments


def _bases_of_caller(program: Program, call: ast.Call) -> Sequence[ast.ClassDef | str]:
    """Of `super().__init__()`, the classes that its own class is derived from."""
    called_on = owner_of(call)
    if not isinstance(called_on, ast.Call) or called_name(called_on) != "super":
        return []

    function = enclosing_function(call)
    inheriting = enclosing_class(function) if function is not None else None
    return program.ancestry(inheriting)[1:] if inheriting is not None else []
