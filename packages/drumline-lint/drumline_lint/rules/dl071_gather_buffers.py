"""DL071: what a gather is given has not the shape or the length that it needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import rank_tests_at
from drumline_lint.flow.loops import has_gradients_off
from drumline_lint.program.calls import argument
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ancestors,
    dotted,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
)
from drumline_lint.reading.source import Source

RULE = rule("DL071", only_distributed=False)
_GATHERING = ("torch.distributed.all_gather", "torch.distributed.all_gather_object")
_SELECTING = ("nonzero", "masked_select", "unique")
_LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "logsumexp", "log_softmax")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Lists with one tensor many times or none at all, tensors of another length on each rank, and
    gathered features that a loss is computed from without a gradient."""
    yield from _lists_of_others(program, source)
    for call in program.calls(source, *_GATHERING):
        buffers = written_values(program, argument(call, 0, "tensor_list"))
        buffers += written_values(program, argument(call, None, "object_list"))
        if any(_is_repeated(buffer) for buffer in buffers):
            message = "the list has the same tensor for every rank: all parts are those of one rank"
            fix = "make one tensor for each rank: [torch.empty_like(x) for _ in range(world_size)]"
            yield RULE.at(source, call, message, fix=fix)
        elif buffers and all(_is_empty(program, call, buffer) for buffer in buffers):
            message = "the list is empty, and needs a place for every rank"
            yield RULE.at(source, call, message, fix="make it [None] * world_size")
        elif _is_none(program, argument(call, 0, "object_list")):
            message = "the list is None, and needs a place for every rank"
            yield RULE.at(source, call, message, fix="make it [None] * world_size")
        elif _is_selection(program, call):
            message = "each rank selects another number of rows, and the ranks gather one shape"
            fix = "gather the sizes first, and pad to the largest"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)
        elif program.name_of(call.func) == _GATHERING[0] and _loses_gradient(program, call):
            message = "what is gathered has no gradient, and a loss is computed from it"
            fix = "put this rank's own tensor back into the list, or use torch.distributed.nn"
            yield RULE.at(source, call, message, fix=fix)


def _lists_of_others(program: Program, source: Source) -> Iterator[Finding]:
    """`gather_list` on every rank, though only one takes the parts."""
    for call in program.calls(source, "torch.distributed.gather"):
        listed = written_values(program, argument(call, 1, "gather_list"))
        is_always = bool(listed) and all(
            isinstance(part, ast.List | ast.ListComp | ast.BinOp) for part in listed
        )
        if is_always and not any(rank_tests_at(program, call)):
            message = "gather_list is given on every rank: only dst may have it, the others fail"
            fix = "pass gather_list=parts if rank == dst else None"
            yield RULE.at(source, call, message, fix=fix)


def _is_repeated(buffer: ast.expr) -> bool:
    """`[torch.zeros_like(x)] * world_size`; None and numbers may be repeated."""
    if not isinstance(buffer, ast.BinOp) or not isinstance(buffer.op, ast.Mult):
        return False
    listed = [side for side in (buffer.left, buffer.right) if isinstance(side, ast.List)]
    return any(isinstance(item, ast.Call) for items in listed for item in items.elts)


def _is_none(program: Program, buffer: ast.expr | None) -> bool:
    origins = written_values(program, buffer)
    return bool(origins) and all(
        isinstance(origin, ast.Constant) and origin.value is None for origin in origins
    )


def _is_empty(program: Program, call: ast.Call, buffer: ast.expr) -> bool:
    """`[]` to which nothing is added before the call."""
    name = dotted(call.args[0]) if call.args else ""
    adding = [
        addition
        for addition in nodes_in(scope_of(call), ast.Call)
        if dotted(addition.func) in (f"{name}.append", f"{name}.extend")
    ]
    is_literal = isinstance(buffer, ast.List) and not buffer.elts
    return is_literal and bool(name) and not adding


def _is_selection(program: Program, call: ast.Call) -> bool:
    """Rows by a condition, where no sizes were exchanged before."""
    tensor = argument(call, 1, "tensor")
    is_first = not any(
        position(exchange) < position(call)
        for exchange in nodes_in(scope_of(call), ast.Call)
        if re.search("gather|reduce", last_name(exchange.func))
    )
    is_object = program.name_of(call.func) == _GATHERING[1]
    return (
        is_first
        and not is_object
        and any(_selects(program, origin) for origin in written_values(program, tensor))
    )


def _selects(program: Program, origin: ast.expr) -> bool:
    if isinstance(origin, ast.Subscript):
        return any(isinstance(mask, ast.Compare) for mask in written_values(program, origin.slice))
    return isinstance(origin, ast.Call) and last_name(origin.func) in _SELECTING


def _loses_gradient(program: Program, call: ast.Call) -> bool:
    """Whether a function that computes a loss gathers features, itself or by a helper."""
    function = enclosing_function(call)
    tensor = argument(call, 1, "tensor")
    if function is None or has_gradients_off(program, call) or _is_put_back(function):
        return False
    if tensor is None or not isinstance(tensor, ast.Name) or _is_detached(program, tensor):
        return False
    owner = enclosing_class(function)
    if owner is not None and any(
        str(base).endswith("Function") for base in program.ancestry(owner)
    ):
        return False
    callers = [] if owner is not None else program.callers(function)
    if any(has_gradients_off(program, caller) for caller in callers):
        return False
    homes = [(function, call), *((enclosing_function(caller), caller) for caller in callers)]
    return any(
        home is not None
        and "loss" in _names_around(home)
        and _computes_loss(home)
        and not _uses_local(home, gathering)
        for home, gathering in homes
    )


def _uses_local(function: ast.AST, gathering: ast.Call) -> bool:
    """Whether a product has what is gathered also as it was: through that the gradient goes."""
    names = {name.id for part in gathering.args for name in nodes_in(part, ast.Name)}
    gatherer = dotted(gathering.func)

    def is_same_call(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and dotted(node.func) == gatherer

    return any(
        name.id in names
        for product in nodes_in(function, ast.BinOp, ast.Call)
        if _is_product(product)
        for name in nodes_in(product, ast.Name)
        if not any(is_same_call(outer) for outer in ancestors(name))
    )


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and last_name(node.func) in ("matmul", "mm")


def _names_around(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    owner = enclosing_class(function)
    return f"{function.name} {'' if owner is None else owner.name}".lower()


def _computes_loss(function: ast.AST) -> bool:
    has_product = any(map(_is_product, nodes_in(function, ast.BinOp, ast.Call)))
    names = {last_name(call.func) for call in nodes_in(function, ast.Call)}
    return has_product and not names.isdisjoint(_LOSSES)


def _is_put_back(function: ast.AST) -> bool:
    """`gathered[rank] = x`, or a list that is made of both."""
    stored = [
        target
        for statement in nodes_in(function, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Subscript)
    ]
    return bool(stored)


def _is_detached(program: Program, tensor: ast.Name) -> bool:
    words = ("detach", "no_grad", "labels", "label", "targets", "ids")
    texts = [ast.unparse(origin) for origin in written_values(program, tensor)]
    return any(word in text for text in (tensor.id, *texts) for word in words)
