"""Training and evaluation loops, and the calls that each of their rounds makes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache

from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query, leads_to
from drumline_lint.program.tree import (
    LOOPS,
    SCOPES,
    FunctionNode,
    Loop,
    ancestors,
    calls_written,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
)
from drumline_lint.reading.source import Source

NO_GRADIENTS = (
    "torch.no_grad",
    "torch.inference_mode",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
)
# Iterables that are not data.
NOT_BATCHES = tuple(
    "range trange parameters named_parameters modules named_modules children items keys values".split()
)


def batch_loops(program: Program, source: Source) -> list[Loop]:
    """The loops of a file that call `.backward()` in every round, there or in a function that they
    call.

    A loop over epochs, which contains it only in another loop, is not one.
    """
    every = _loops_around_backward(program)
    return sorted((loop for loop in every if program.source_of(loop) is source), key=position)


@cached_query
def _loops_around_backward(program: Program) -> list[Loop]:
    """From each `.backward()` outwards, and through the callers of its function, up to the first
    loop."""
    loops: dict[Loop, None] = {}
    functions: set[ast.AST] = set()
    pending: list[ast.AST] = [
        call
        for source in program.sources
        if "backward" in source.text
        for call in program.index(source).calls.get("backward", ())
        if isinstance(call.func, ast.Attribute)
    ]
    while pending:
        node = pending.pop()
        loop = loop_around(node)
        function = enclosing_function(node)
        if loop is not None:
            loops[loop] = None
        if (
            function is not None
            and function not in functions
            and (loop is None or _is_generator(loop))
        ):
            functions.add(function)
            callers = program.callers(function)
            pending += callers if loop is None else []
            if _is_generator(function):
                loops.update(
                    dict.fromkeys(
                        caller_loop
                        for caller_loop in map(_loop_over, callers)
                        if caller_loop is not None
                    )
                )
    return list(loops)


def loop_around(node: ast.AST) -> Loop | None:
    inner = node
    for outer in ancestors(node):
        if isinstance(outer, LOOPS) and (inner in repeated(outer)):
            return outer
        if isinstance(outer, SCOPES):
            return None
        inner = outer
    return None


def _loop_over(call: ast.AST) -> ast.For | None:
    """The loop that iterates over the result of a call: `for x in tqdm(steps())`."""
    for outer in ancestors(call):
        if isinstance(outer, ast.For):
            return outer if call in nodes_in(outer.iter, ast.Call) else None
        if isinstance(outer, ast.stmt):
            return None
    return None


def evaluation_loops(program: Program, source: Source) -> list[Loop]:
    """Loops over batches without a `.backward()`, with gradients off or the model in `eval()`
    mode."""
    return [
        loop
        for kind in (ast.For, ast.AsyncFor)
        for loop in program.index(source).every(kind)
        if _may_be_batches(program, loop)
        and _is_without_gradients(program, loop)
        and not makes(program, loop, is_backward)
    ]


def outer_loops(program: Program, loop: ast.AST) -> Iterator[Loop]:
    """The loops around a loop, in its function and in its callers, innermost first."""
    visited: set[ast.AST] = set()
    pending = [loop]
    while pending:
        node = pending.pop(0)
        for outer in ancestors(node):
            if isinstance(outer, LOOPS) and outer not in visited:
                visited.add(outer)
                yield outer
        function = enclosing_function(node)
        if function is not None and function not in visited:
            visited.add(function)
            pending += program.callers(function)


def makes(program: Program, node: ast.AST, is_meant: Callable[[Program, ast.Call], bool]) -> bool:
    """Whether such a call is made in it, or in a function of the given files that it calls."""
    return leads_to(program, node, _writes(is_meant), _callees)


@cache
def _writes(is_meant: Callable[[Program, ast.Call], bool]) -> Callable[[Program, ast.AST], bool]:
    return lambda program, node: any(
        is_meant(program, call) for call, _ in _calls_and_callees(program, node)
    )


def _callees(program: Program, node: ast.AST) -> list[FunctionNode]:
    pairs = _calls_and_callees(program, node)
    return [function for _, function in pairs if function is not None]


def is_backward(program: Program, call: ast.Call) -> bool:
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


def calls_made_in(program: Program, node: ast.AST) -> Iterator[ast.Call]:
    """All calls that are made in it: those written there, and those in the functions that they
    call, in order.

    A function is followed once, at its first call. A loop over a generator also runs the
    generator's loop.
    """
    visited: set[FunctionNode] = set()
    stack = [iter(_calls_and_callees(program, node))]
    while stack:
        for call, function in stack[-1]:
            yield call
            if function is not None and function not in visited:
                visited.add(function)
                stack.append(iter(_calls_and_callees(program, function)))
                break
        else:
            stack.pop()


@cached_query
def _calls_and_callees(
    program: Program, node: ast.AST
) -> list[tuple[ast.Call, FunctionNode | None]]:
    """The calls that are written in it, each with the function of the given files that it runs at
    once: not with a generator."""
    parts = repeated(node)
    if isinstance(node, ast.For):
        parts = [*_generating(program, node), *parts]
    calls = [call for part in parts for call in calls_written(part)]
    pairs = [(call, program.function_of(call)) for call in calls]
    return [
        (call, None if function is None or _is_generator(function) else function)
        for call, function in pairs
    ]


def _generating(program: Program, loop: ast.For) -> Iterator[ast.AST]:
    """What a generator of the given files runs for each item that it yields to the loop."""
    made = program.iterated(loop.iter)
    function = program.function_of(made) if isinstance(made, ast.Call) else None
    for inner in nodes_in(function, *LOOPS) if function is not None else ():
        if _is_generator(inner):
            yield from repeated(inner)
            return


def _is_generator(node: ast.AST) -> bool:
    return bool(nodes_in(node, ast.Yield, ast.YieldFrom))


def _may_be_batches(program: Program, loop: ast.For | ast.AsyncFor) -> bool:
    over = program.iterated(loop.iter)
    if isinstance(over, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Constant)):
        return False
    return not (isinstance(over, ast.Call) and last_name(over.func) in NOT_BATCHES)


def _is_without_gradients(program: Program, loop: Loop) -> bool:
    if any(_is_off(program, block) for block in nodes_in(loop, ast.With)) or is_in_evaluation(
        program, loop
    ):
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
    modes = [
        call
        for call in nodes_in(scope_of(node), ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("eval", "train")
        if position(call) < position(node)
    ]
    last = modes[-1] if modes else None
    return last is not None and (last_name(last.func) == "eval") != _is_given_false(last)


def _is_given_false(call: ast.Call) -> bool:
    """`model.train(False)` is `model.eval()`."""
    return any(
        isinstance(argument, ast.Constant) and argument.value is False for argument in call.args
    )


def _is_off(program: Program, block: ast.With) -> bool:
    return any(_is_no_grad(program, item.context_expr) for item in block.items)


def _is_no_grad(program: Program, expression: ast.expr) -> bool:
    if isinstance(expression, ast.Call):
        if program.name_of(expression.func) == "torch.set_grad_enabled":
            return _is_given_false(expression)
        expression = expression.func
    return program.name_of(expression) in NO_GRADIENTS
