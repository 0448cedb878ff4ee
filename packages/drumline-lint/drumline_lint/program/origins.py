"""Where a value comes from: its expression, one step back or completely.

Of `path` in `torch.save(state, path)`, after `path = folder / name` and `folder = Path(args.out)`, one
step back is `folder / name`; completely it is also `Path(args.out)`, `args.out` and `name`.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.queries import is_counter
from drumline_lint.program.ranks import is_world_size
from drumline_lint.program.tree import (
    Binding,
    FunctionNode,
    ancestors,
    children,
    dotted,
    last_name,
    nodes_in,
)
from drumline_lint.program.value import Instance, Rank, constants_in

MOST_PARTS = 200
"""The most expressions for one query: more occur only in generated code."""
# Attributes of a path that are still a path; other attributes say nothing about their owner.
_PARTS_OF_PATHS = ("parent", "name", "stem", "parents", "suffix")


def written_values(program: Program, expression: ast.expr | None) -> list[ast.expr]:
    """All expressions that it may come from; a name or parameter of unknown origin is kept.

    Of `path` after `path = args.out or "model.pt"` these are `args.out` and `"model.pt"`.
    """
    written: list[ast.expr] = []
    pending = [] if expression is None else [expression]
    visited = set[ast.expr]()

    while pending and len(visited) < MOST_PARTS:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)

        earlier = previous_values(program, current)
        pending += [value for value in earlier if value is not None]
        if not earlier or None in earlier:
            written.append(current)

    return written


def previous_values(program: Program, expression: ast.expr) -> Sequence[ast.expr | None]:
    """The expressions that it gets its value from, one step back; includes None for an unknown
    one."""
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return list(expression.values)
    if isinstance(expression, ast.Attribute):
        return _of_attribute(program, expression)
    if not isinstance(expression, ast.Name):
        return []

    bindings = program.bindings(expression)
    return [value for binding in bindings for value in _of_binding(program, binding)]


def _of_binding(program: Program, binding: Binding) -> Sequence[ast.expr | None]:
    """What is bound: of `a, b = x, y` the expression in the same place, of a parameter what callers
    pass; None for a loop and for what is unknown."""
    if isinstance(binding.node, ast.arg):
        return program.arguments_for(binding.node)
    if binding.value is None or binding.kind not in ("assign", "entered"):
        return [None]

    value = binding.value
    for number in binding.path:
        if not isinstance(value, (ast.Tuple, ast.List)) or number >= len(value.elts):
            break
        value = value.elts[number]

    return [value]


def _of_attribute(program: Program, node: ast.Attribute) -> list[ast.expr | None]:
    """What is assigned to it, if the owner is an instance or the same expression.

    `self.path` is what the methods of its class assign, `args.path` what this file assigns.
    """
    homes: list[ast.ClassDef] = []
    for value in program.values(node.value):
        if isinstance(value, Instance):
            places = program.ancestry(value.of)
            homes += [place for place in places if not isinstance(place, str)]

    as_written = "" if homes else dotted(node.value)
    values: list[ast.expr | None] = []
    for source in dict.fromkeys(map(program.source_of, [node, *homes])):
        for target, binding in program.index(source).attributes.get(node.attr, ()):
            is_in_class = any(outer in homes for outer in ancestors(target))
            if is_in_class or (as_written and dotted(target.value) == as_written):
                values += _of_binding(program, binding)

    return values


def parts(
    program: Program,
    expression: ast.expr | None,
    is_end: Callable[[ast.expr], bool] | None = None,
) -> Iterator[ast.expr]:
    """An expression, its parts, and all their origins, but for those behind an end.

    Of `folder / name` these are `folder`, `name`, and what both come from. The nearest come first,
    since there is a limit.
    """
    pending = deque([] if expression is None else [expression])
    visited: set[ast.expr] = set()

    while pending and len(visited) < MOST_PARTS:
        current = pending.popleft()
        if current in visited:
            continue
        visited.add(current)

        yield current
        if is_end is not None and is_end(current):
            continue

        pending.extendleft(reversed([*_inner(current)]))
        pending += [value for value in previous_values(program, current) if value is not None]
        if isinstance(current, ast.Call):
            pending += _returned(program.function_of(current))
        pending += _iterated(program, current)


def _iterated(program: Program, expression: ast.expr) -> Iterator[ast.expr]:
    """What a loop over it goes over; a number from `range` or `enumerate` does not depend on it."""
    if not isinstance(expression, ast.Name):
        return

    for binding in program.bindings(expression):
        if binding.kind != "each" or binding.value is None or is_counter(binding):
            continue
        called = getattr(binding.value, "func", binding.value)
        if last_name(called) not in ("range", "trange"):
            yield binding.value


def _returned(function: FunctionNode | None) -> list[ast.expr]:
    """What a function returns, but for a lambda and `__init__`."""
    if function is None or getattr(function, "name", "__init__") == "__init__":
        return []

    values = [statement.value for statement in nodes_in(function, ast.Return)]
    return [value for value in values if value is not None]


def _inner(expression: ast.expr) -> Iterator[ast.expr]:
    """The parts of an expression that its value is made of, without the name of a function."""
    if isinstance(expression, ast.Attribute):
        if expression.attr in _PARTS_OF_PATHS:
            yield expression.value
        return

    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        yield expression.func.value

    for child in children(expression):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and child is not getattr(expression, "func", None):
            yield child


def is_one(program: Program, number: ast.expr) -> bool:
    """Whether it is 1, or an option with this default."""
    return constants(program, number) == {1}


def constants(program: Program, number: ast.expr) -> set[object]:
    """What it is known to be, also as the default of an option: 4 for `args.num_steps`, if the
    option has this default."""
    written = [number, *_defaults_of_option(program, last_name(number))]
    return {
        constant for expression in written for constant in constants_in(program.values(expression))
    }


def _defaults_of_option(program: Program, name: str) -> Iterator[ast.expr | None]:
    """4 of `parser.add_argument("--num-steps", default=4)`, for `num_steps`."""
    for source in program.sources:
        for option in program.index(source).calls.get("add_argument", ()):
            flag = option.args[0] if option.args else None

            if not isinstance(flag, ast.Constant):
                continue
            if str(flag.value).lstrip("-").replace("-", "_") == name:
                yield argument(option, None, "default")


def depends_on_rank(program: Program, expression: ast.expr | None) -> bool:
    """Whether it is made of a rank or the world size, directly or not."""
    return any(is_rank_or_count(program, node) for node in parts(program, expression))


def is_rank_or_count(program: Program, node: ast.AST) -> bool:
    """`rank`, `dist.get_rank()`, `world_size`."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp)):
        return False

    return is_world_size(node) or is_rank(program, node)


def is_rank(program: Program, expression: ast.expr | None) -> bool:
    """Whether it may be the number of this process."""
    return any(isinstance(value, Rank) for value in program.values(expression))
