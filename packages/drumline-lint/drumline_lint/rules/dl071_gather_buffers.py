"""DL071: what a gather is given has not the shape or the length that it needs.

`all_gather` needs a list with a tensor for every rank, and tensors of one shape.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.origins import depends_on_rank, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    called_name,
    calls_beside,
    dotted,
    enclosing_function,
    nodes_in,
    scope_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import is_stripe, pieces

RULE = rule("DL071", only_distributed=False)

_GATHERING = ("torch.distributed.all_gather", "torch.distributed.all_gather_object")
_OF_ONE_SHAPE = ("torch.distributed.all_gather", "torch.distributed.all_gather_into_tensor")
_MAKING_TENSORS = ("as_tensor", "tensor")
# Of all values of a tensor, where they are given no dimension.
_REDUCING = ("mean", "norm", "std", "sum", "var")
_COUNTING = ("float", "int", "item", "len", "nelement", "numel", "round")
_DEEPEST_SUM = 4


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Lists with one tensor many times or none at all, and tensors of differing lengths.

    For example:

        parts = [torch.zeros_like(x)] * world_size
        dist.all_gather(parts, x)
    """
    for call in program.calls(source, *_GATHERING):
        buffers = written_values(program, call.args[0] if call.args else None)
        if any(_is_repeated(buffer) for buffer in buffers):
            message = "the list has the same tensor for every rank: all parts are those of one rank"
            fix = "make one tensor for each rank: [torch.empty_like(x) for _ in range(world_size)]"
            yield RULE.at(source, call, message, fix=fix)

        elif buffers and all(_is_empty(call, buffer) for buffer in buffers):
            message = "the list is empty, and needs a place for every rank"
            yield RULE.at(source, call, message, fix="make it [None] * world_size")

    for call in program.calls(source, *_OF_ONE_SHAPE):
        yield from _of_own_length(program, source, call)


def _is_repeated(buffer: ast.expr) -> bool:
    """`[torch.zeros_like(x)] * world_size`; None and numbers may be repeated."""
    if not isinstance(buffer, ast.BinOp) or not isinstance(buffer.op, ast.Mult):
        return False

    lists = [side for side in (buffer.left, buffer.right) if isinstance(side, ast.List)]
    return any(isinstance(item, ast.Call) for items in lists for item in items.elts)


def _is_empty(call: ast.Call, buffer: ast.expr) -> bool:
    """Whether a list is empty, and nothing is added to it before the call.

    For example:

        parts = []
        dist.all_gather_object(parts, x)
    """
    name = dotted(call.args[0])
    if not name or not isinstance(buffer, ast.List) or buffer.elts:
        return False

    called = [dotted(nearby.func) for nearby in calls_beside(call)]
    return f"{name}.append" not in called and f"{name}.extend" not in called


# Lengths


def _of_own_length(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A tensor whose length differs across the ranks, where nothing exchanges the lengths.

    For example:

        correct = scores[scores > 0.5]
        dist.all_gather(parts, correct)
    """
    tensor = argument(call, 1, "tensor")
    function = source.code(scope_of(call)) if enclosing_function(call) else source.text
    if tensor is None or any(word in function for word in ("pad", "max(", "all_gather_object")):
        return

    every = pieces(program, tensor, lambda part: _is_of_numbers(program, part))
    here = [part for part in every if program.source_of(part) is source]
    if any(_makes_uneven(program, part) for part in here):
        message = f"{source.code(tensor)} has its own length on each rank, and all_gather needs one"
        fix = "gather the lengths first, and pad to the longest"
        yield RULE.at(source, call, message, fix=fix)


def _makes_uneven(program: Program, part: ast.expr) -> bool:
    """Whether it has a length of its own on each rank.

    For example:

        scores[scores > 0.5]
        range(rank, n, world_size)
        min((rank + 1) * part, n)
    """
    if isinstance(part, ast.Subscript):
        mask = part.slice
        masks = program.assigned(mask) if isinstance(mask, ast.Name) else [mask]
        return any(isinstance(value, ast.Compare) for value in masks)

    if not isinstance(part, ast.Call):
        return False
    if is_stripe(program, part):
        return True

    is_least = called_name(part) == "min"
    return is_least and any(depends_on_rank(program, value) for value in part.args)


def _is_of_numbers(program: Program, part: ast.expr) -> bool:
    """Whether it is as long on every rank, also if a function returns it.

    For example:

        torch.tensor([right, total])
        losses.mean()
    """
    if not isinstance(part, ast.Call):
        return False

    function = program.function_of(part)
    if function is None or isinstance(function, ast.Lambda):
        return _is_tensor_of_numbers(program, part)

    returned = [
        origin
        for statement in nodes_in(function, ast.Return)
        for origin in written_values(program, statement.value)
    ]
    return bool(returned) and all(
        isinstance(origin, ast.Call) and _is_tensor_of_numbers(program, origin)
        for origin in returned
    )


def _is_tensor_of_numbers(program: Program, call: ast.Call) -> bool:
    """`torch.tensor([right, total])`, where both are numbers, and `losses.mean()`."""
    if called_name(call) not in _MAKING_TENSORS or not call.args:
        return _is_reduced(call)

    content = call.args[0]
    numbers = content.elts if isinstance(content, ast.List | ast.Tuple) else [content]
    return all(_is_number(program, number) for number in numbers)


def _is_reduced(call: ast.Call) -> bool:
    """Whether it is made of all values of a tensor, but not along a dimension.

    For example:

        losses.mean()
        torch.mean(losses)
        sum(counts)
    """
    if called_name(call) not in _REDUCING or call.keywords:
        return False

    is_function = isinstance(call.func, ast.Name) or dotted(call.func).startswith("torch.")
    return len(call.args) == int(is_function)


def _is_number(program: Program, expression: ast.expr, depth: int = 0) -> bool:
    """Whether all that is known of it are numbers; a counter begins with one.

    `right` and `total` here:

        right = 0
        total = len(labels) * 2
    """
    origins = written_values(program, expression)
    written = [origin for origin in origins if not isinstance(origin, ast.Name)]
    if not written or depth >= _DEEPEST_SUM:
        return False

    return all(_is_numeric(program, origin, depth) for origin in written)


def _is_numeric(program: Program, origin: ast.expr, depth: int) -> bool:
    """`0`, `len(labels)`, and a sum of such."""
    if isinstance(origin, ast.BinOp):
        sides = (origin.left, origin.right)
        return all(_is_number(program, side, depth + 1) for side in sides)

    if isinstance(origin, ast.Call):
        return called_name(origin) in _COUNTING or _is_reduced(origin)
    return isinstance(origin, ast.Constant) and isinstance(origin.value, int | float)
