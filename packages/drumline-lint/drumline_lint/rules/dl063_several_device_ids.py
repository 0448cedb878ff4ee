"""DL063: DDP is given all GPUs of the host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name, nodes_in
from drumline_lint.reading.source import Source

RULE = rule("DL063")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`device_ids` with more than one device, which DDP refuses."""
    for call in program.calls(source, DDP):
        devices = argument(call, 1, "device_ids")
        if any(_is_several(value) for value in written_values(program, devices)):
            message = "device_ids has several GPUs: DDP takes one for each process, and raises"
            yield RULE.at(source, devices, message)


def _is_several(devices: ast.expr) -> bool:
    if isinstance(devices, ast.List | ast.Tuple):
        return len(devices.elts) > 1
    names = [last_name(call.func) for call in nodes_in(devices, ast.Call)]
    return "range" in names and "device_count" in names
