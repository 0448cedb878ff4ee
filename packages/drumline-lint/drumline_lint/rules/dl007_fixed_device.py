"""DL007: all ranks of a host use the same GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, called_name, calls_beside, is_after
from drumline_lint.reading.source import Source

RULE = rule("DL007", in_tests=False)
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
