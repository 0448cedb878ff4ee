"""DL065: NCCL is given a tensor on the CPU.

A tensor is on the CPU if all calls that may have made it name no device.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import has_group, short_name
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near, calls_near
from drumline_lint.program.names import COLLECTIVES, INIT
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL065")

_MAKING = tuple(f"torch.{name}" for name in "tensor zeros ones empty full arange".split())
_WITHOUT_TENSORS = ("barrier", "init_device_mesh", "new_group", "new_subgroups")
_EXCHANGING = tuple(
    name
    for name in COLLECTIVES
    if "object" not in name and short_name(name) not in _WITHOUT_TENSORS
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Tensors that are made without a device and passed to a collective of an NCCL group.

    For example:

        total = torch.tensor(len(losses))
        dist.all_reduce(total)
    """
    calls = list(program.calls(source, *_EXCHANGING))
    if not calls or not _has_nccl_only(program, source):
        return

    for call in calls:
        if has_group(program, call) or _is_known_by_place(program, call):
            continue

        tensor = call.args[0] if call.args else None
        origins = written_values(program, tensor)
        if origins and all(_is_made_on_cpu(program, origin) for origin in origins):
            message = (
                f"{source.code(call.args[0])} is on the CPU, and NCCL exchanges GPU tensors only"
            )
            yield RULE.at(source, call, message)


def _has_nccl_only(program: Program, source: Source) -> bool:
    """Whether all groups are of NCCL, and tensors are on the CPU unless their device is written:
    `torch.set_default_device` may change that."""
    if any_text_near(program, source, "torch.set_default_"):
        return False

    inits = calls_near(program, source, INIT)
    backends = [program.values(argument(call, 0, "backend")) for call in inits]
    return bool(backends) and all(values == {ConstantValue("nccl")} for values in backends)


def _is_known_by_place(program: Program, call: ast.Call) -> bool:
    """Whether a condition asks where the tensor is.

    For example:

        if not x.is_cuda:
            x = x.cuda()
        else:
            dist.all_reduce(x)
    """
    tests = [ast.unparse(test) for test, _ in conditions(program, call)]
    return any(word in test for test in tests for word in ("is_cuda", ".is_cpu", ".device"))


def _is_made_on_cpu(program: Program, origin: ast.expr) -> bool:
    """`torch.zeros(1)`"""
    if not isinstance(origin, ast.Call) or program.name_of(origin.func) not in _MAKING:
        return False

    device = argument(origin, None, "device")
    return device is None and not has_unknown_arguments(origin)
