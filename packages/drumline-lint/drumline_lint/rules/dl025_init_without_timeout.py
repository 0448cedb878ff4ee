"""DL025: the process group has no explicit timeout."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL025")
DEFAULTS = {"nccl": "10 minutes with NCCL", "gloo": "30 minutes with Gloo"}
LONGER = "30 minutes"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every call without it; MPI has no such timeout."""
    for call in program.calls(source, INIT):
        backends = {
            backend.value
            for backend in program.values(argument(call, 0, "backend"))
            if isinstance(backend, ConstantValue)
        }
        timeout = argument(call, 2, "timeout")
        is_given = timeout is not None and program.values(timeout) != {ConstantValue(None)}
        if is_given and _is_number(program, timeout):
            message = "timeout is a number, and must be a timedelta: this call raises a TypeError"
            yield RULE.at(source, call, message, severity=Severity.ERROR)
        if has_unknown_arguments(call) or is_given or backends == {"mpi"}:
            continue
        waits = " or ".join(_waits(call, {str(name).lower() for name in backends}))
        yield RULE.at(
            source,
            call,
            f"{source.code(call.func)} has no timeout: ranks wait for a stuck one for {waits}",
        )


def _is_number(program: Program, timeout: ast.expr | None) -> bool:
    values = program.values(timeout)
    return bool(values) and all(
        isinstance(value, ConstantValue) and isinstance(value.value, int | float)
        for value in values
    )


def _waits(call: ast.Call, backends: set[str]) -> list[str]:
    """NCCL's is taken only where it is named, or found by the device."""
    if argument(call, 0, "backend") is None and argument(call, None, "device_id") is None:
        return [LONGER]
    if backends and not backends & DEFAULTS.keys():
        return [LONGER]
    return [words for name, words in DEFAULTS.items() if name in backends] or list(
        DEFAULTS.values()
    )
