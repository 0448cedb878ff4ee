"""Training and evaluation loops, and the calls that each of their rounds makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    LOOPS,
    SCOPES,
    FunctionNode,
    Loop,
    ancestors,
    called_name,
    calls_beside,
    calls_written,
    enclosing_function,
    is_after,
    last_name,
    nodes_in,
    position,
)
from drumline_lint.reading.source import Source

DEEPEST = 3
"""How many calls are followed from a loop."""
NO_GRADIENTS = (
    "torch.no_grad",
    "torch.inference_mode",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
)

# Iterables that are not data.
_NOT_BATCHES = set(
    "range trange parameters named_parameters modules named_modules children items keys values".split()
)


def batch_loops(program: Program, source: Source) -> list[Loop]:
    """The loops of a file that call `.backward()` in every round, there or in a function that they
    call; not those that contain it only in another loop.

    for batch in loader:  # this one
        loss = model(batch)
        loss.backward()
    """
    every = _loops_around_backward(program)
    return sorted((loop for loop in every if program.source_of(loop) is source), key=position)


@cached_query
def _loops_around_backward(program: Program) -> list[Loop]:
    """From each `.backward()` outwards, and through the callers of its function, up to the first
    loop."""
    loops: dict[Loop, None] = {}
    pending: list[tuple[ast.AST, int]] = []

    for source in program.sources:
        if "backward" in source.text:
            calls = program.index(source).calls.get("backward", ())
            pending += [(call, 0) for call in calls if is_backward(call)]

    while pending:
        node, depth = pending.pop()
        loop = loop_around(node)
        function = enclosing_function(node)

        if loop is not None:
            loops[loop] = None
        elif function is not None and depth < DEEPEST:
            pending += [(call, depth + 1) for call in program.callers(function)]

    return list(loops)


def loop_around(node: ast.AST) -> Loop | None:
    """The innermost loop in its function whose every round runs it."""
    inner = node
    for outer in ancestors(node):
        if isinstance(outer, LOOPS) and inner in repeated(outer):
            return outer
        if isinstance(outer, SCOPES):
            return None
        inner = outer

    return None


def outer_loops(program: Program, node: ast.AST, depth: int = 0) -> Iterator[Loop]:
    """The loops around a node, in its function and in its callers, innermost first."""
    yield from (outer for outer in ancestors(node) if isinstance(outer, LOOPS))

    function = enclosing_function(node)
    if function is None or depth == DEEPEST:
        return
    for call in program.callers(function):
        yield from outer_loops(program, call, depth + 1)


@cached_query
def evaluation_loops(program: Program, source: Source) -> list[Loop]:
    """Loops over batches without a `.backward()`, with gradients off or the model in `eval()`
    mode.

    model.eval()
    for batch in validation_loader:  # this one
        correct += count(model(batch))
    """
    loops: list[Loop] = []
    for loop in program.index(source).every(ast.For):
        if not _may_be_batches(program, loop) or not _is_without_gradients(program, loop):
            continue
        if not any(is_backward(call) for call in calls_made_in(program, loop)):
            loops.append(loop)

    return loops


def is_backward(call: ast.Call) -> bool:
    """Whether it is `something.backward()`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls that are written in it, without inner functions; for a loop, those of every
    round."""
    for part in repeated(node):
        yield from calls_written(part)


def repeated(node: ast.AST) -> list[ast.AST]:
    """The parts of a loop that every round runs: not its iterable, nor its `else`. For a function,
    its body."""
    if isinstance(node, ast.While):
        return [node.test, *node.body]

    if isinstance(node, (ast.For, ast.AsyncFor, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        return [*node.body]

    return [node]


# The functions that a loop calls.


def calls_made_in(program: Program, node: ast.AST) -> list[ast.Call]:
    """The calls that are written in it, and those in the functions that they call, in order. A
    function is followed once."""
    return _calls_made(program, node, 0, set())


def _calls_made(
    program: Program, node: ast.AST, depth: int, visited: set[FunctionNode]
) -> list[ast.Call]:
    """The calls of a function or loop, each followed by those that it leads to."""
    calls: list[ast.Call] = []

    for call, function in callees(program, node):
        calls.append(call)
        if function is not None and function not in visited and depth < DEEPEST:
            visited.add(function)
            calls += _calls_made(program, function, depth + 1, visited)

    return calls


@cached_query
def callees(program: Program, node: ast.AST) -> list[tuple[ast.Call, FunctionNode | None]]:
    """The calls that are written in it, each with the function of the given files that it runs at
    once: not with a generator."""
    pairs: list[tuple[ast.Call, FunctionNode | None]] = []
    for call in calls_in(node):
        function = program.function_of(call)
        is_run = function is not None and not nodes_in(function, ast.Yield)
        pairs.append((call, function if is_run else None))

    return pairs


# Gradients that are off.


def _may_be_batches(program: Program, loop: ast.For) -> bool:
    """Whether a loop may go over data: not over a list that is written out, nor `range(10)`."""
    over = program.iterated(loop.iter)
    if isinstance(over, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Constant)):
        return False

    return not isinstance(over, ast.Call) or called_name(over) not in _NOT_BATCHES


def _is_without_gradients(program: Program, loop: Loop) -> bool:
    """Whether gradients are off around it, in it, or around all calls of its function."""
    if is_in_evaluation(program, loop):
        return True
    if any(_is_off(program, block) for block in nodes_in(loop, ast.With)):
        return True

    function = enclosing_function(loop)
    callers = [] if function is None else program.callers(function)
    return bool(callers) and all(is_in_evaluation(program, call) for call in callers)


def has_gradients_off(program: Program, node: ast.AST) -> bool:
    """Whether gradients are off, by a `with` around it or a decorator of its function."""
    for outer in ancestors(node):
        if isinstance(outer, ast.With) and _is_off(program, outer):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(_is_no_grad(program, decorator) for decorator in outer.decorator_list)

    return False


def is_in_evaluation(program: Program, node: ast.AST) -> bool:
    """Whether gradients are off, or the model was last put into `eval()` mode before it."""
    if has_gradients_off(program, node):
        return True

    modes = [call for call in calls_beside(node) if _sets_mode(call) and is_after(node, call)]
    if not modes:
        return False

    is_eval = last_name(modes[-1].func) == "eval"
    return is_eval != _is_given_false(modes[-1])


def _sets_mode(call: ast.Call) -> bool:
    """`model.eval()`, `model.train()`"""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("eval", "train")


def _is_given_false(call: ast.Call) -> bool:
    """`model.train(False)` is `model.eval()`."""
    return any(isinstance(value, ast.Constant) and value.value is False for value in call.args)


def _is_off(program: Program, block: ast.With) -> bool:
    """`with torch.no_grad():`"""
    return any(_is_no_grad(program, item.context_expr) for item in block.items)


def _is_no_grad(program: Program, expression: ast.expr) -> bool:
    """`torch.no_grad()`, also without the call, and `torch.set_grad_enabled(False)`."""
    if isinstance(expression, ast.Call):
        if program.name_of(expression.func) == "torch.set_grad_enabled":
            return _is_given_false(expression)
        expression = expression.func

    return program.name_of(expression) in NO_GRADIENTS
