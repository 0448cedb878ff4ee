"""Where training happens: the loops that go over batches, and what is done at every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.program import Program
from drumline.lint.program.tree import (
    LOOPS,
    SCOPES,
    FunctionNode,
    Loop,
    above,
    function_around,
    inside,
    last_name,
    position,
    scope_node,
)
from drumline.lint.reading.source import Source

NO_GRADIENTS = (
    "torch.no_grad",
    "torch.inference_mode",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
)
# What is iterated over by these is no data.
NOT_BATCHES = (
    "range",
    "trange",
    "parameters",
    "named_parameters",
    "modules",
    "named_modules",
    "children",
    "items",
    "keys",
    "values",
)


def batch_loops(program: Program, source: Source) -> list[Loop]:
    """The loops of a file that call `.backward()` in every round, there or in a function that they call.

    A loop over epochs, that comes to it only through another loop, is none.
    """
    index = program.index(source)
    loops = [loop for kind in LOOPS for loop in index.every(kind) if _steps(program, loop)]
    return sorted(loops, key=position)


def evaluation_loops(program: Program, source: Source) -> list[Loop]:
    """Loops over batches without a `.backward()`, where gradients are off or the model was put into `eval()`."""
    return [
        loop
        for kind in (ast.For, ast.AsyncFor)
        for loop in program.index(source).every(kind)
        if _may_be_batches(program, loop)
        and _is_without_gradients(program, loop)
        and not reaches(program, loop, "backward")
    ]


def outer_loops(program: Program, loop: ast.AST) -> Iterator[Loop]:
    """The loops around a loop, in its function and in those that call it, inmost first."""
    seen: set[ast.AST] = set()
    pending = [loop]
    while pending:
        node = pending.pop(0)
        for outer in above(node):
            if isinstance(outer, LOOPS) and outer not in seen:
                seen.add(outer)
                yield outer
        function = function_around(node)
        if function is not None and function not in seen:
            seen.add(function)
            pending += program.callers(function)


def reaches(program: Program, node: ast.AST, method: str) -> bool:
    """Whether `.method()` is called in it, or in a function of the given files that it calls."""
    return next(reached(program, node, method), None) is not None


def reached(program: Program, node: ast.AST, method: str) -> Iterator[ast.Call]:
    """All calls of `.method()` in it and in the functions that it calls; of one's own, those that it comes down to."""
    for call in done_in(program, node):
        if isinstance(call.func, ast.Attribute) and call.func.attr == method:
            function = program.function_of(call)
            if function is None or not reaches(program, function, method):
                yield call


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls that are written in it, those of inner functions left out; of a loop, those of every round."""
    for part in repeated(node):
        yield from _written(part, into_loops=True)


def repeated(node: ast.AST) -> list[ast.AST]:
    """The parts of a loop that every round runs: not what it iterates over, nor its `else`. Of a function, its body."""
    if isinstance(node, ast.While):
        return [node.test, *node.body]
    if isinstance(node, ast.For | ast.AsyncFor | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        return [*node.body]
    return [node]


def done_in(program: Program, node: ast.AST) -> Iterator[ast.Call]:
    """All calls that are made in it: those written there, and those in the functions that they call, in order.

    A function is looked into once, where it is first called. A loop over a generator runs that one's loop, too.
    """
    return _done_in(program, node, set(), into_loops=True)


def _steps(program: Program, loop: Loop) -> bool:
    """Whether a round calls `.backward()` without another loop in between."""
    for call in _done_in(program, loop, set(), into_loops=False):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            function = program.function_of(call)
            if function is None or not reaches(program, function, "backward"):
                return True
    return False


def _done_in(
    program: Program, node: ast.AST, seen: set[FunctionNode], *, into_loops: bool
) -> Iterator[ast.Call]:
    parts = repeated(node)
    if isinstance(node, ast.For):
        parts = [*_generating(program, node), *parts]
    for part in parts:
        for call in _written(part, into_loops):
            yield call
            function = program.function_of(call)
            if function is not None and function not in seen and not _is_generator(function):
                seen.add(function)
                yield from _done_in(program, function, seen, into_loops=into_loops)


def _written(part: ast.AST, into_loops: bool) -> Iterator[ast.Call]:
    stack = [part]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.Call):
            yield current
        if isinstance(current, SCOPES) or (isinstance(current, LOOPS) and not into_loops):
            continue
        stack.extend(reversed(list(ast.iter_child_nodes(current))))


def _generating(program: Program, loop: ast.For) -> Iterator[ast.AST]:
    """What a generator of the given files does for each thing that it hands to the loop."""
    made = program.iterated(loop.iter)
    function = program.function_of(made) if isinstance(made, ast.Call) else None
    for inner in inside(function, *LOOPS) if function is not None else ():
        if _is_generator(inner):
            yield from repeated(inner)
            return


def _is_generator(node: ast.AST) -> bool:
    return next(inside(node, ast.Yield, ast.YieldFrom), None) is not None


def _may_be_batches(program: Program, loop: ast.For | ast.AsyncFor) -> bool:
    over = program.iterated(loop.iter)
    if isinstance(over, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.Constant):
        return False
    return not (isinstance(over, ast.Call) and last_name(over.func) in NOT_BATCHES)


def _is_without_gradients(program: Program, loop: Loop) -> bool:
    if any(_is_off(program, one) for one in inside(loop, ast.With)) or _is_all_off(program, loop):
        return True
    function = function_around(loop)
    callers = [] if function is None else program.callers(function)
    return bool(callers) and all(_is_all_off(program, call) for call in callers)


def _is_all_off(program: Program, node: ast.AST) -> bool:
    """By a `with` around it, a decorator, or because the model was last put into `eval()` before it."""
    for outer in above(node):
        if isinstance(outer, ast.With) and _is_off(program, outer):
            return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_is_no_grad(program, one) for one in outer.decorator_list):
                return True
            break
    modes = [
        call
        for call in inside(scope_node(node), ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("eval", "train")
        if position(call) < position(node)
    ]
    last = modes[-1] if modes else None
    return last is not None and (last_name(last.func) == "eval") != _is_given_false(last)


def _is_given_false(call: ast.Call) -> bool:
    """`model.train(False)` is `model.eval()`."""
    return any(isinstance(one, ast.Constant) and one.value is False for one in call.args)


def _is_off(program: Program, block: ast.With) -> bool:
    return any(_is_no_grad(program, item.context_expr) for item in block.items)


def _is_no_grad(program: Program, expression: ast.expr) -> bool:
    if isinstance(expression, ast.Call):
        if program.name_of(expression.func) == "torch.set_grad_enabled":
            return _is_given_false(expression)
        expression = expression.func
    return program.name_of(expression) in NO_GRADIENTS
