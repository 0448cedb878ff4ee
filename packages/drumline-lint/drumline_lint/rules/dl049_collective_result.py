"""DL049: the result of a collective is used before it is there, or where it is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import short_name
from drumline_lint.flow.conditions import rank_tests_at, rest_of_block
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    dotted,
    enclosing_function,
    end_position,
    last_name,
    nodes_in,
    parent_of,
    position,
    scope_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL049", only_distributed=False)
DEEPEST = 4
_WITH_RESULT = {"new_group", "new_subgroups", "init_device_mesh"}
_IN_PLACE = tuple(name for name in COLLECTIVES if short_name(name) not in _WITH_RESULT)
_IMMEDIATE = ("torch.distributed.isend", "torch.distributed.irecv")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Handles that nobody waits for, and values of calls that return None."""
    for call in program.calls(source, *_IN_PLACE):
        if _is_async(program, call):
            yield from _unwaited(program, source, call)
        elif argument(call, None, "async_op") is None and not has_unknown_arguments(call):
            yield from _used_value(program, source, call)
    for call in program.calls(source, *_IMMEDIATE):
        yield from _unwaited(program, source, call)
    for call in program.calls(source, "torch.distributed.reduce"):
        yield from _stepped_everywhere(program, source, call)


def _stepped_everywhere(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """`dist.reduce(loss, 0)`, then `plateau.step(loss)` on all ranks, also behind a function."""
    tensor = dotted(call.args[0]) if call.args else ""
    function = enclosing_function(call)
    if not tensor or any(rank_tests_at(program, call)):
        return
    places: list[tuple[ast.AST, str]] = [(scope_of(call), tensor)]
    returned = [] if function is None else nodes_in(function, ast.Return)
    if any(tensor in map(dotted, nodes_in(value, ast.Name)) for value in returned):
        callers = program.callers(function) if function is not None else []
        statements = [(caller, parent_of(caller)) for caller in callers]
        places += [
            (scope_of(caller), dotted(statement.targets[0]))
            for caller, statement in statements
            if isinstance(statement, ast.Assign)
        ]
    for scope, name in places:
        for step in nodes_in(scope, ast.Call):
            names = [part for value in step.args for part in nodes_in(value, ast.Name)]
            is_step = last_name(step.func) == "step" and name in map(dotted, names)
            if is_step and not any(rank_tests_at(program, step)):
                message = (
                    f"only one rank gets the result of {source.code(call.func)}, and every rank "
                    f"steps with it ({program.source_of(step).where(step)})"
                )
                yield RULE.at(source, call, message, fix="use dist.all_reduce")
                return


def _is_async(program: Program, call: ast.Call) -> bool:
    return program.values(argument(call, None, "async_op")) == {ConstantValue(True)}


def _unwaited(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    is_dropped = _is_dropped(call) and _is_used_later(call)
    if (is_dropped or _is_used_early(call)) and not _synchronizes(call):
        message = (
            f"nothing waits for {source.code(call.func)}: "
            "its tensor is used before the transfer is complete"
        )
        yield RULE.at(source, call, message)


def _is_dropped(call: ast.Call) -> bool:
    """Whether the handle is not kept, or kept under a name that is not used."""
    statement = parent_of(call)
    if isinstance(statement, ast.Expr):
        return True
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Name):
        return False
    names = nodes_in(scope_of(call), ast.Name, into_functions=True)
    return not any(name.id == target.id and isinstance(name.ctx, ast.Load) for name in names)


def _is_used_later(call: ast.Call) -> bool:
    """Whether the function does something else with the tensor afterwards."""
    tensor = dotted(call.args[0]) if call.args else ""
    names = nodes_in(scope_of(call), ast.Name, ast.Attribute)
    return any(
        dotted(name) == tensor and position(name) > end_position(call) for name in names if tensor
    )


def _is_used_early(call: ast.Call) -> bool:
    """`work = dist.all_reduce(x, async_op=True)`, then `x` before `work.wait()`."""
    statement = parent_of(call)
    tensor = dotted(call.args[0]) if call.args else ""
    if not isinstance(statement, ast.Assign) or not tensor:
        return False
    work = dotted(statement.targets[0])
    for following in rest_of_block(statement):
        names = {dotted(name) for name in nodes_in(following, ast.Name, ast.Attribute)}
        if work in names:
            return False
        if tensor in names:
            return _is_read(following, tensor)
    return False


def _is_read(statement: ast.stmt, tensor: str) -> bool:
    """Whether it computes something of it; a name, `parts.append(x)` and `return x` hand it on."""
    return isinstance(statement, ast.AugAssign) or any(
        tensor in map(dotted, nodes_in(part, ast.Name, ast.Attribute))
        for part in nodes_in(statement, ast.BinOp, ast.Compare, ast.Attribute)
        if not isinstance(part, ast.Attribute) or part.attr == "item"
    )


def _synchronizes(call: ast.Call) -> bool:
    """`torch.cuda.synchronize()` waits for everything, and so may `sync_all()`."""
    names = [last_name(candidate.func) for candidate in nodes_in(scope_of(call), ast.Call)]
    return any("sync" in name for name in names)


def _is_result_used(program: Program, call: ast.Call, depth: int = 0) -> bool:
    """Whether a caller of a function that returns it does something with it."""
    function = enclosing_function(call)
    callers = [] if function is None or depth > DEEPEST else program.callers(function)
    return any(
        _is_result_used(program, caller, depth + 1)
        if isinstance(parent_of(caller), ast.Return)
        else not isinstance(parent_of(caller), ast.Expr)
        for caller in callers
    )


def _used_value(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    outer = parent_of(call)
    if isinstance(outer, ast.Assign) and dotted(outer.targets[0]) == "_":
        return
    is_used = isinstance(
        outer, ast.Assign | ast.AugAssign | ast.BinOp | ast.Attribute | ast.Compare
    )
    if is_used or (isinstance(outer, ast.Return) and _is_result_used(program, call)):
        message = (
            f"{source.code(call.func)} works in place and returns None, "
            "and its return value is used"
        )
        yield RULE.at(source, call, message)
