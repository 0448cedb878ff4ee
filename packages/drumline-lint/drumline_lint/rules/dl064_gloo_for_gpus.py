"""DL064: gradients on GPUs are exchanged by Gloo."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL064", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`backend="gloo"` in a program that wraps a model with GPUs in DDP."""
    for call in program.calls(source, INIT):
        backend = argument(call, 0, "backend")
        is_gloo = program.values(backend) == {ConstantValue("gloo")}
        if is_gloo and not any(conditions(program, call)) and _wraps_on_gpu(program, source):
            message = "gloo copies every gradient through the CPU, and the model is on GPUs"
            yield RULE.at(source, call, message)


def _wraps_on_gpu(program: Program, source: Source) -> bool:
    wrappings = [call for home in connected(program, source) for call in program.calls(home, DDP)]
    devices = [argument(call, 1, "device_ids") for call in wrappings]
    return bool(devices) and all(
        device is not None and program.values(device) != {ConstantValue(None)} for device in devices
    )
