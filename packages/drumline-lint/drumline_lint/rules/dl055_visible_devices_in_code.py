"""DL055: code hides GPUs from a rank and then counts as if it saw all."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.hosts import Setting, settings
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.imports import calls_near
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import is_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import calls_beside, is_after, nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

_STARTS_CUDA = tuple(
    f"torch.cuda.{name}"
    for name in "set_device init current_device get_device_properties get_device_name".split()
)
RULE = rule("DL055", only_distributed=False, in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that is set by the rank, to one GPU for all ranks, or too late."""
    for setting in settings(program, source):
        if setting.name != "CUDA_VISIBLE_DEVICES" or any(rank_tests_at(program, setting.node)):
            continue
        if _is_by_rank(program, setting.value) and _indexes_by_rank(program, source):
            message = (
                "each rank sees only its own GPU, which is cuda:0, "
                "and this file numbers GPUs by the local rank"
            )
            yield RULE.at(source, setting.node, message)
        elif _is_one(program, setting) and calls_near(program, source, INIT):
            message = "every rank sees the same single GPU"
            yield RULE.at(source, setting.node, message)
        elif _is_late(program, setting.node):
            message = "the GPUs are already in use here, and the variable is no longer read"
            fix = "set it before the process starts"
            yield RULE.at(source, setting.node, message, fix=fix)


def _is_by_rank(program: Program, value: ast.expr | None) -> bool:
    """`str(local_rank)`; what the user asks for, `args.gpu_id`, may be several."""
    names = nodes_in(value, ast.Name, ast.Attribute) if value is not None else []
    return any("rank" in ast.unparse(name).lower() and is_rank(program, name) for name in names)


def _indexes_by_rank(program: Program, source: Source) -> bool:
    """By a rank that is not taken modulo the number of visible GPUs."""
    return any(
        any(is_rank(program, part) for part in nodes_in(device, ast.Name, ast.Attribute))
        and not any("device_count" in ast.unparse(part) for part in parts(program, device))
        for device in devices_given(program, source)
    )


def _is_one(program: Program, setting: Setting) -> bool:
    values = program.values(setting.value)
    return bool(values) and all(
        isinstance(value, ConstantValue) and str(value.value).isdecimal() for value in values
    )


def _is_late(program: Program, node: ast.AST) -> bool:
    """After a call in the same function that starts CUDA."""
    calls = [call for call in calls_beside(node) if is_after(node, call)]
    return any(
        program.name_of(inner.func) in _STARTS_CUDA
        for call in calls
        if not any(conditions(program, call))
        for inner in calls_made_in(program, call)
    )
