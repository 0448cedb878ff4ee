"""DL008: the global rank is used as the number of a GPU on this host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.hosts import meets_on_one_host
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

RULE = rule("DL008", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In `set_device`, `torch.device`, `.to`, `.cuda` and DDP's `device_ids`."""
    if meets_on_one_host(program, source):
        return
    for device in (
        number for argument in devices_given(program, source) for number in _numbers(argument)
    ):
        ranks = {value.kind for value in program.values(device) if isinstance(value, Rank)}
        # A parameter that is named so, and of which no caller is seen, may be the number of a
        # process of mp.spawn.
        is_seen = not any(
            isinstance(origin, ast.Name) for origin in written_values(program, device)
        )
        if ranks == {"global"} and is_seen and program.source_of(device) is source:
            message = f"{source.code(device)} is the rank among all hosts, not a GPU of this one"
            yield RULE.at(source, device, message)


def _numbers(device: ast.expr) -> list[ast.expr]:
    """Of `f"cuda:{rank}"`, what is put in."""
    if isinstance(device, ast.JoinedStr):
        return [part.value for part in device.values if isinstance(part, ast.FormattedValue)]
    return [device]
