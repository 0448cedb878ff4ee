"""DL064: gradients on GPUs are exchanged by Gloo.

Gloo has its place for tensors on the CPU; the gradients of a model with `device_ids` are on GPUs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import calls_near
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL064", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A group of Gloo in a program that wraps a model with GPUs in DDP.

    For example:

        dist.init_process_group(backend="gloo")
        model = DDP(model, device_ids=[local_rank])
    """
    for call in program.calls(source, INIT):
        backend = argument(call, 0, "backend")
        if program.values(backend) != {ConstantValue("gloo")}:
            continue

        is_always = not any(conditions(program, call))
        if is_always and _wraps_on_gpu(program, source):
            message = "gloo copies every gradient through the CPU, and the model is on GPUs"
            yield RULE.at(source, call, message)


def _wraps_on_gpu(program: Program, source: Source) -> bool:
    """Whether there is a DDP, and each has `device_ids`: without them it may be on the CPU."""
    wrappings = calls_near(program, source, DDP)
    return bool(wrappings) and all(_has_device_ids(program, wrapping) for wrapping in wrappings)


def _has_device_ids(program: Program, wrapping: ast.Call) -> bool:
    devices = argument(wrapping, 1, "device_ids")
    return devices is not None and program.values(devices) != {ConstantValue(None)}
