"""DL008: the global rank is used as the number of a GPU on this host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import are_exclusive
from drumline_lint.flow.hosts import meets_on_one_host, speaks_of_nodes
from drumline_lint.program.origins import parts, previous_values, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

RULE = rule("DL008", in_tests=False)
_OF_SCHEDULERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In `set_device`, `torch.device`, `.to`, `.cuda` and DDP's `device_ids`."""
    if meets_on_one_host(program, source):
        return
    lines = set()
    for device in (
        number for argument in devices_given(program, source) for number in _numbers(argument)
    ):
        ranks = {value.kind for value in program.values(device) if isinstance(value, Rank)}
        # A parameter that is named so, and of which no caller is seen, may be the number of a
        # process of mp.spawn.
        is_seen = not any(
            isinstance(origin, ast.Name) for origin in written_values(program, device)
        )
        is_global = ranks == {"global"} and is_seen and program.source_of(device) is source
        if any(are_exclusive(program, value, device) for value in _assigned(program, device)):
            continue  # it is the global rank in another branch
        if is_global and device.lineno not in lines:
            lines.add(device.lineno)
            is_sure = _is_of_scheduler(program, device) or speaks_of_nodes(program, source)
            severity = Severity.WARNING if is_sure else Severity.NOTE
            message = f"{source.code(device)} is the rank among all hosts, not a GPU of this one"
            yield RULE.at(source, device, message, severity=severity)


def _assigned(program: Program, device: ast.expr) -> list[ast.expr]:
    return [value for value in previous_values(program, device) if value is not None]


def _is_of_scheduler(program: Program, device: ast.expr) -> bool:
    """Who starts ranks by Slurm or MPI has several nodes."""
    constants = [part for part in parts(program, device) if isinstance(part, ast.Constant)]
    return any(constant.value in _OF_SCHEDULERS for constant in constants)


def _numbers(device: ast.expr) -> list[ast.expr]:
    """Of `f"cuda:{rank}"`, what is put in."""
    if isinstance(device, ast.JoinedStr):
        return [part.value for part in device.values if isinstance(part, ast.FormattedValue)]
    return [device]
