"""Classes, functions and parameters of the given files: base classes, callers, return values,
arguments."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from drumline_lint.program import ranks
from drumline_lint.program.calls import (
    argument,
    default_of,
    has_unknown_arguments,
    is_instance,
    number_of,
)
from drumline_lint.program.queries import ProgramView, any_of, cached_query, unpacked
from drumline_lint.program.tree import (
    NAMED_FUNCTIONS,
    FunctionNode,
    NamedFunction,
    called_name,
    enclosing_class,
    nodes_in,
    parent_of,
    position,
    source_of,
)
from drumline_lint.program.value import (
    NOTHING,
    CallResult,
    Class,
    ConstantValue,
    Function,
    Instance,
    Library,
    LoopItem,
    Method,
    Rank,
    Value,
    Values,
    only,
)


def ancestry(program: ProgramView, node: ast.ClassDef) -> list[ast.ClassDef | str]:
    """The class and its base classes, nearest first; those of libraries by name."""
    return program.meanings.memo(("ancestry", node), lambda: _find_ancestry(program, node))


def _find_ancestry(program: ProgramView, node: ast.ClassDef) -> list[ast.ClassDef | str]:
    """Breadth first: the class, its bases, their bases."""
    classes: list[ast.ClassDef | str] = [node]

    for place in classes:  # which grows meanwhile
        if isinstance(place, str):
            continue
        for base in place.bases:
            for value in program.values(base):
                if isinstance(value, Class) and value.node not in classes:
                    classes.append(value.node)
                elif isinstance(value, Library) and value.name not in classes:
                    classes.append(value.name)

    return classes


def is_module(program: ProgramView, node: ast.ClassDef) -> bool:
    """Whether it is a class of models: a subclass of `torch.nn.Module`."""
    return any(
        isinstance(place, str) and place.endswith("nn.Module") for place in ancestry(program, node)
    )


def method(program: ProgramView, node: ast.ClassDef, name: str) -> FunctionNode | None:
    """A method of a class, its own or that of the nearest base class."""
    for place in ancestry(program, node):
        if isinstance(place, str):
            continue

        scope = program.files.index(source_of(place)).scopes[place]
        for binding in scope.names.get(name, ()):
            if isinstance(binding.node, NAMED_FUNCTIONS):
                return binding.node

    return None


def called_as(program: ProgramView, node: ast.ClassDef) -> str:
    """The method that a call of an instance runs."""
    return "forward" if is_module(program, node) else "__call__"


def name_of_owner(program: ProgramView, owner: Value) -> str:
    """The beginning of a method's full name.

    Of `model.eval()` it is `torch.nn.Module`, where the class of the model is one of the given files
    and that is its nearest base class from a library.
    """
    if isinstance(owner, (CallResult, Library)):
        return owner.name
    if isinstance(owner, Method):
        return f"{name_of_owner(program, owner.of)}.{owner.name}"

    if not isinstance(owner, (Instance, Class)):
        return ""

    node = owner.of if isinstance(owner, Instance) else owner.node
    of_libraries = [place for place in ancestry(program, node) if isinstance(place, str)]
    return of_libraries[0] if of_libraries else node.name


_WORD = re.compile(r"\w+")
# They start a function in other processes or threads.
STARTING = ("spawn", "start_processes", "Process", "Thread")


def function_of(program: ProgramView, call: ast.Call) -> FunctionNode | None:
    """The function of the given files that a call runs, the first of several; for a class, its
    `__init__`."""
    values = [
        value
        for value in program.values(call.func)
        if isinstance(value, (Function, Class, Instance))
    ]
    if not values:
        return None

    first = values[0] if len(values) == 1 else min(values, key=_in_text)
    if isinstance(first, Function):
        return first.node
    if isinstance(first, Class):
        return method(program, first.node, "__init__")

    return method(program, first.of, called_as(program, first.of))


def _in_text(value: Function | Class | Instance) -> tuple[str, tuple[int, int], str]:
    """A sort key: sets have no order, and findings must not depend on the process."""
    node = value.of if isinstance(value, Instance) else value.node

    return str(source_of(node).path), position(node), value.__class__.__name__


def returned(program: ProgramView, function: FunctionNode) -> Values:
    """What a function returns, from all of its `return` statements."""
    if isinstance(function, ast.Lambda):
        return program.values(function.body)

    expressions = [statement.value for statement in nodes_in(function, ast.Return)]
    return program.meanings.once(
        ("returned", function), lambda: any_of(program, expressions), NOTHING
    )


def callers(program: ProgramView, function: FunctionNode) -> list[ast.Call]:
    """All resolved calls of it in the given files.

    `main(args)`, and `mp.spawn(main, args=(world_size,))`, which has it called.
    """
    nobody: list[ast.Call] = []
    return program.meanings.once(
        ("callers", function), lambda: _find_callers(program, function), nobody
    )


def _find_callers(program: ProgramView, function: FunctionNode) -> list[ast.Call]:
    """The calls by its name that resolve to it; for `__init__`, by the name of the class."""
    if isinstance(function, ast.Lambda):
        return []

    name = function.name
    owner = enclosing_class(function)
    if owner is not None and name in ("forward", "__call__"):
        return []  # calls of an instance cannot be found by name

    if owner is not None and name == "__init__":
        name = owner.name

    calling = []
    for source in program.files.calling.get(name, ()):
        for call in program.files.index(source).calls.get(name, ()):
            if function_of(program, call) is function:
                calling.append(call)

    for call in _calls_that_start(program).get(name, ()):
        if function in started_functions(program, call):
            calling.append(call)

    return calling


@cached_query
def _calls_that_start(program: ProgramView) -> dict[str, list[ast.Call]]:
    """By every word of their files, so that calls that may start a function are found without
    reading all texts."""
    by_word: dict[str, list[ast.Call]] = defaultdict(list)

    for name in STARTING:
        for source in program.files.calling.get(name, ()):
            calls = program.files.index(source).calls.get(name, ())
            starting = [call for call in calls if target_of(call) is not None]
            if not starting:
                continue
            for word in set(_WORD.findall(source.text)):
                by_word[word] += starting

    return by_word


def started_functions(program: ProgramView, call: ast.Call) -> list[FunctionNode]:
    """What a call starts in another process or thread.

    It is `main` for `mp.spawn(main)` and `Process(target=main)`.
    """
    target = target_of(call)
    if target is None:  # as of nearly all
        return []

    functions = [value.node for value in program.values(target) if isinstance(value, Function)]
    return list(dict.fromkeys(functions))


def target_of(call: ast.Call) -> ast.expr | None:
    """The function that a call starts, if it starts one."""
    if called_name(call) not in STARTING:
        return None

    return argument(call, 0, "fn") or argument(call, None, "target")


# They pass the number of the process as the first argument.
_NUMBERING = ("spawn", "start_processes")


def of_parameter(program: ProgramView, parameter: ast.arg) -> Values:
    """What a parameter may be: an instance for `self`, otherwise what callers pass.

    `rank` of `def train(rank)` is a local rank if there is `mp.spawn(train, ...)`.
    """
    function = function_with(parameter)
    if function is None:
        return NOTHING

    owner = enclosing_class(function)
    if owner is not None and is_instance(function, parameter):
        return only(Instance(owner))

    return program.meanings.once(parameter, lambda: _passed(program, function, parameter), NOTHING)


def function_with(parameter: ast.arg) -> NamedFunction | None:
    """The function that it is a parameter of; not a lambda."""
    function = parent_of(parent_of(parameter) or parameter)
    return function if isinstance(function, NAMED_FUNCTIONS) else None


def _passed(program: ProgramView, function: NamedFunction, parameter: ast.arg) -> Values:
    """What callers pass, and the default where one passes nothing; if that says nothing, what the
    name means, unless its default is another number: `def lora(rank=8)`."""
    number = number_of(function, parameter)
    default = program.values(default_of(function, parameter))
    values: Values = NOTHING
    is_left_out = False

    for call in callers(program, function):
        if function in started_functions(program, call):
            values |= _passed_to_started(program, call, number)
            continue

        value = argument(call, number, parameter.arg)
        values |= program.values(value)
        if value is None and not has_unknown_arguments(call):
            is_left_out = True

    if values - {ConstantValue(None)}:
        return values | default if is_left_out else values

    named = NOTHING if ranks.is_other_number(default) else ranks.by_name(parameter.arg)
    return named or values | default


def _passed_to_started(program: ProgramView, call: ast.Call, number: int | None) -> Values:
    """What a function gets in a new process, as its parameter of this number: the number of the
    process, if it is passed, or one of `args`."""
    if number is None:
        return NOTHING

    if called_name(call) in _NUMBERING:
        if number == 0:
            return only(Rank("spawned"))
        number -= 1

    values = unpacked(program, program.values(argument(call, 1, "args")), (number,))
    is_counted = any(isinstance(value, LoopItem) and _is_range(value.of) for value in values)
    return only(Rank("spawned")) if is_counted else values


def _is_range(iterated: ast.expr) -> bool:
    """`for i in range(n): Process(target=main, args=(i,))` numbers the processes."""
    return isinstance(iterated, ast.Call) and called_name(iterated) == "range"


@cached_query
def arguments_for(program: ProgramView, parameter: ast.arg) -> list[ast.expr | None]:
    """The arguments of all callers for a parameter; None for an unknown one."""
    function = function_with(parameter)
    if function is None:
        return [None]

    number = number_of(function, parameter)
    default = default_of(function, parameter)
    arguments: list[ast.expr | None] = []

    for call in callers(program, function):
        if function in started_functions(program, call):
            arguments.append(None)
        else:
            left_out = None if has_unknown_arguments(call) else default
            arguments.append(argument(call, number, parameter.arg) or left_out)

    return arguments or [None]
