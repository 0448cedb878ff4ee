"""DL002: DDP gets a model that is not where it will be."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import has_unknown_arguments
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function, position
from drumline_lint.program.value import CallResult
from drumline_lint.reading.source import Source
from drumline_lint.training.models import (
    has_devices,
    is_made_on_cpu,
    is_moved_before,
    is_on_cpu_only,
    moves_of,
    moves_to_gpu,
    wrapped,
)

RULE = rule("DL002")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Wrapped, then moved; or given device_ids, and never moved."""
    calls = list(program.calls(source, DDP))
    if not calls or framework(program, source) or is_on_cpu_only(program, source):
        return
    for call in calls:
        model = wrapped(call)
        if model is None or has_unknown_arguments(call) or is_moved_before(program, model, call):
            continue
        moved = _moved_after(program, source, call, model)
        model_code = source.code(model)
        if moved is not None:
            line = source.place(moved).line
            yield RULE.at(
                source,
                call,
                f"{model_code} is still on the CPU when DDP wraps it: it is moved in line {line}",
            )
        elif (
            has_devices(program, call)
            and not _is_parameter(program, model)
            and is_made_on_cpu(program, model)
        ):
            yield RULE.at(
                source,
                call,
                f"DDP is given device_ids, but {model_code} was never moved from the CPU",
            )


def _is_parameter(program: Program, model: ast.expr) -> bool:
    """Whoever else calls the function may have moved it."""
    bindings = program.bindings(model) if isinstance(model, ast.Name) else []
    return any(binding.kind == "parameter" for binding in bindings)


def _moved_after(
    program: Program, source: Source, call: ast.Call, model: ast.expr
) -> ast.Call | None:
    calls = program.index(source).calls
    moves = [
        move
        for move in (*calls.get("to", ()), *calls.get("cuda", ()))
        if isinstance(move.func, ast.Attribute)
        and any(
            isinstance(value, CallResult) and value.call is call
            for value in program.values(move.func.value)
        )
        and moves_to_gpu(program, move)
    ]
    moves += [
        move
        for move in moves_of(program, model)
        if enclosing_function(move) is enclosing_function(call) and _is_same(program, move, model)
    ]
    later = [move for move in moves if position(move) > position(call) or move.func.value is call]
    return min(later, key=position, default=None)


def _is_same(program: Program, move: ast.Call, model: ast.expr) -> bool:
    """Whether the name still means the model: it may have been given to another one."""
    owner = move.func.value if isinstance(move.func, ast.Attribute) else None
    if not isinstance(owner, ast.Name) or not isinstance(model, ast.Name):
        return True
    return any(binding in program.bindings(model) for binding in program.bindings(owner))
