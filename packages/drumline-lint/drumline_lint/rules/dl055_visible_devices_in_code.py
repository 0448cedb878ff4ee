"""DL055: code hides GPUs from a rank and then counts as if it saw all."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rank_tests_at
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.hosts import Setting, settings
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function, position
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

RULE = rule("DL055", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that is set by the rank, or to one GPU for all ranks."""
    for setting in settings(program, source):
        if setting.name != "CUDA_VISIBLE_DEVICES" or any(rank_tests_at(program, setting.node)):
            continue
        is_by_rank = _has_rank(program, setting.value) and not _lists_gpus(program, setting.value)
        if is_by_rank and _indexes_by_rank(program, source):
            message = (
                "each rank sees only its own GPU, which is cuda:0, "
                "and this file numbers GPUs by the local rank"
            )
            yield RULE.at(source, setting.node, message)
        elif _is_one(program, setting) and is_on_every_rank(program, setting.node):
            message = "every rank sees the same single GPU"
            yield RULE.at(source, setting.node, message)
        elif _is_late(program, source, setting.node):
            message = "the GPUs are already in use here, and the variable is no longer read"
            yield RULE.at(source, setting.node, message, fix="set it before the process starts")


def _is_late(program: Program, source: Source, node: ast.AST) -> bool:
    """After a call in the same function that starts CUDA."""
    return any(
        enclosing_function(call) is enclosing_function(node) and position(call) < position(node)
        for call in program.calls(source, "torch.cuda.set_device", "torch.cuda.init")
    )


def _has_rank(program: Program, value: ast.expr | None) -> bool:
    return any(
        isinstance(meaning, Rank)
        for part in parts(program, value)
        for meaning in program.values(part)
    )


def _lists_gpus(program: Program, value: ast.expr | None) -> bool:
    """`config["gpu_id"]` is what the user asks for, and may be several."""
    keys = [part.slice for part in parts(program, value) if isinstance(part, ast.Subscript)]
    return any(isinstance(key, ast.Constant) and "gpu" in str(key.value).lower() for key in keys)


def _indexes_by_rank(program: Program, source: Source) -> bool:
    return any(_has_rank(program, device) for device in devices_given(program, source))


def _is_one(program: Program, setting: Setting) -> bool:
    values = program.values(setting.value)
    return bool(values) and all(
        isinstance(value, ConstantValue) and str(value.value).isdecimal() for value in values
    )
