"""DL007: all ranks of a host use the same GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near, calls_near
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    calls_beside,
    is_after,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_on_default_gpu, wrapped

RULE = rule("DL007", in_tests=False)
_CHOOSING = ("set_device", "device_id=", "cuda.device(", "set_default_", "VISIBLE_DEVICES")
_OBJECTS = tuple(
    f"torch.distributed.{name}"
    for name in ("all_gather_object", "gather_object", "broadcast_object_list")
)
_SEES_ONE = re.compile(r"CUDA_VISIBLE_DEVICES|gpus-per-task|gpu-bind|gres=gpu:1\b")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Numbers that are written out for DDP and beside the start of a group."""
    if framework(program, source) or any_text_near(program, source, "CUDA_VISIBLE_DEVICES"):
        return  # where each process sees one GPU only, its number is 0
    if any(_SEES_ONE.search(launch.script.text) for launch in program.launches_of(source)):
        return
    for call in program.calls(source, DDP):
        for listed in written_values(program, argument(call, 1, "device_ids")):
            numbers = listed.elts if isinstance(listed, ast.List) else []
            if len(numbers) == 1 and not any(conditions(program, call)):
                yield from _fixed(source, numbers[0])
    for call in program.calls(source, INIT):
        yield from _beside_start(program, source, call)
    if is_of_ranks(program, source) and not _is_chosen(program, source):
        yield from _by_default(program, source)


def _is_chosen(program: Program, source: Source) -> bool:
    """Whether anything may choose the GPU of a process, or NCCL is not used for certain."""
    inits = calls_near(program, source, INIT)
    backends = [program.values(argument(call, 0, "backend")) for call in inits]
    is_nccl = bool(backends) and all(values == {ConstantValue("nccl")} for values in backends)
    return not is_nccl or any_text_near(program, source, *_CHOOSING)


def _by_default(program: Program, source: Source) -> Iterator[Finding]:
    """Models that DDP wraps on the GPU without a number, and exchanges of objects."""
    fix = "call torch.cuda.set_device(local_rank) first"
    for wrapping in program.calls(source, DDP):
        moves = [
            part for part in parts(program, wrapped(wrapping)) if is_on_default_gpu(program, part)
        ]
        for move in moves[:1]:
            where = program.source_of(move)
            message = f"{where.code(move)} is the first GPU for all ranks of a host: nothing sets the device"
            yield RULE.at(where, move, message, fix=fix, severity=Severity.WARNING)
    for call in program.calls(source, *_OBJECTS):
        if argument(call, None, "device") is None and argument(call, None, "group") is None:
            name = source.code(call.func)
            message = f"{name} uses the first GPU on all ranks of a host: nothing sets the device"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _fixed(source: Source, node: ast.expr) -> Iterator[Finding]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield RULE.at(source, node, f"{source.code(node)} is the same GPU for all ranks of a host")


def _beside_start(program: Program, source: Source, init: ast.Call) -> Iterator[Finding]:
    """`set_device(0)`, and `.cuda()` before `set_device`, in the function that joins the group."""
    if any(conditions(program, init)):
        return
    calls = [
        call
        for call in calls_beside(init)
        if not any(conditions(program, call))
        and not any(isinstance(outer, ast.Try) for outer in ancestors(call))
    ]
    choices = [call for call in calls if program.name_of(call.func) == "torch.cuda.set_device"]
    for choice in choices:
        yield from _fixed(source, choice.args[0]) if choice.args else ()
        for call in calls:
            is_default = called_name(call) == "cuda" and not call.args
            if is_default and isinstance(call.func, ast.Attribute) and is_after(choice, call):
                message = (
                    f"{source.code(call)} comes before set_device: "
                    "it is the first GPU for all ranks of a host"
                )
                yield RULE.at(source, call, message, fix="call torch.cuda.set_device first")
