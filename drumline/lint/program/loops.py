"""Where training happens: the loops that go over batches, and what is done at every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.program import Program
from drumline.lint.program.tree import LOOPS, Loop, above, function_around, inside
from drumline.lint.reading.source import Source

DEEPEST = 6


def batch_loops(program: Program, source: Source) -> list[Loop]:
    """The inmost loops of a file in which `.backward()` is called, there or in a function that they call."""
    index = program.index(source)
    loops = [loop for kind in LOOPS for loop in index.every(kind) if reaches(program, loop, "backward")]
    return [loop for loop in loops if not any(other is not loop and loop in above(other) for other in loops)]


def evaluation_loops(program: Program, source: Source) -> list[Loop]:
    """Loops over batches without a `.backward()`, where gradients are off or the model was put into `eval()`."""
    found = []
    for kind in (ast.For, ast.AsyncFor):
        for loop in program.index(source).every(kind):
            if not reaches(program, loop, "backward") and _is_without_gradients(program, loop):
                found.append(loop)
    return found


def outer_loops(program: Program, loop: ast.AST, depth: int = 0) -> Iterator[Loop]:
    """The loops around a loop, in its function and in those that call it, inmost first."""
    yield from (outer for outer in above(loop) if isinstance(outer, LOOPS))
    function = function_around(loop)
    if function is not None and depth < DEEPEST:
        for call in program.callers(function):
            yield from outer_loops(program, call, depth + 1)


def reaches(program: Program, node: ast.AST, method: str, depth: int = 0) -> bool:
    """Whether `.method()` is called in it, or in a function of the given files that it calls."""
    return next(reached(program, node, method, depth), None) is not None


def reached(program: Program, node: ast.AST, method: str, depth: int = 0) -> Iterator[ast.Call]:
    """All calls of `.method()` in it and in the functions that it calls."""
    for call in calls_in(node):
        if isinstance(call.func, ast.Attribute) and call.func.attr == method:
            yield call
        elif depth < DEEPEST:
            function = program.function_of(call)
            if function is not None:
                yield from reached(program, function, method, depth + 1)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls that are written in it, those of inner functions left out."""
    yield from inside(node, ast.Call)


def done_in(program: Program, node: ast.AST, depth: int = 0) -> Iterator[ast.Call]:
    """All calls that are made in it: those written there, and those in the functions that they call, in order."""
    for call in calls_in(node):
        yield call
        function = program.function_of(call) if depth < DEEPEST else None
        if function is not None:
            yield from done_in(program, function, depth + 1)


def _is_without_gradients(program: Program, loop: ast.AST) -> bool:
    for outer in above(loop):
        if isinstance(outer, ast.With) and any(
            _is_no_grad(program, item.context_expr) for item in outer.items
        ):
            return True
        if isinstance(outer, ast.FunctionDef):
            if any(_is_no_grad(program, one) for one in outer.decorator_list):
                return True
            calls = [call.func for call in calls_in(outer)]
            return any(isinstance(one, ast.Attribute) and one.attr == "eval" for one in calls)
    return any(
        _is_no_grad(program, item.context_expr) for inner in inside(loop, ast.With) for item in inner.items
    )


def _is_no_grad(program: Program, expression: ast.expr) -> bool:
    if isinstance(expression, ast.Call):
        expression = expression.func
    return program.name_of(expression) in ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
