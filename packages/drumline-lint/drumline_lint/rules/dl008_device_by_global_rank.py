"""DL008: the global rank is used as the number of a GPU on this host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import are_exclusive, conditions
from drumline_lint.flow.distributed import has_several_nodes
from drumline_lint.flow.hosts import settings
from drumline_lint.program.origins import is_rank, parts, previous_values, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.allocation import sees_one_gpu, tasks_per_node
from drumline_lint.reading.launchers import PYTHON
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

RULE = rule("DL008", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In `set_device`, `torch.device`, `.to`, `.cuda` and DDP's `device_ids`."""
    yield from _narrowed(program, source)
    lines = set()
    for device in (
        number for argument in devices_given(program, source) for number in _numbers(argument)
    ):
        kinds = {value.kind for value in program.values(device) if isinstance(value, Rank)}
        if (
            kinds == {"local"}
            and _is_alone_with_gpu(program, source)
            and device.lineno not in lines
        ):
            lines.add(device.lineno)
            message = (
                f"--gpus-per-task=1 shows each task one GPU, which is cuda:0 there: "
                f"{source.code(device)} is none but on the first task"
            )
            fix = "choose cuda:0, or ask for --gpus-per-node"
            yield RULE.at(source, device, message, fix=fix, severity=Severity.WARNING)
        if kinds != {"global"} or program.source_of(device) is not source:
            continue
        # a parameter of which no caller is seen may be the number of a process of mp.spawn
        is_seen = not any(isinstance(part, ast.Name) for part in written_values(program, device))
        earlier = [value for value in previous_values(program, device) if value is not None]
        if any(are_exclusive(program, value, device) for value in earlier):
            continue  # it is the global rank in another branch
        if is_seen and device.lineno not in lines:
            lines.add(device.lineno)
            message = f"{source.code(device)} is the rank among all hosts, not a GPU of this one"
            severity = Severity.WARNING if has_several_nodes(program, source) else None
            yield RULE.at(source, device, message, severity=severity)


def _narrowed(program: Program, source: Source) -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES = str(rank)`, and then a GPU by the rank."""
    for setting in settings(program, source):
        is_of_gpus = setting.name == "CUDA_VISIBLE_DEVICES" and setting.value is not None
        if not is_of_gpus or any(conditions(program, setting.node)):
            continue
        is_own = any(is_rank(program, part) for part in parts(program, setting.value))
        devices = [
            number
            for device in devices_given(program, source)
            for number in _numbers(device)
            if is_rank(program, number) and not any(conditions(program, number))
        ]
        if is_own and devices:
            message = (
                "each process then sees one GPU, which is cuda:0 there: "
                f"{source.code(devices[0])} is none but on the first rank"
            )
            fix = "leave CUDA_VISIBLE_DEVICES alone, or choose cuda:0"
            yield RULE.at(source, setting.node, message, fix=fix, severity=Severity.WARNING)


def _is_alone_with_gpu(program: Program, source: Source) -> bool:
    """Whether scripts start it, and all by Slurm with several tasks on a node and a GPU for each."""
    started = program.launches_of(source)
    return bool(started) and all(
        launch.kind == PYTHON and sees_one_gpu(launch) and (tasks_per_node(launch) or 1) > 1
        for launch in started
    )


def _numbers(device: ast.expr) -> list[ast.expr]:
    """Of `f"cuda:{rank}"`, what is put in."""
    if isinstance(device, ast.JoinedStr):
        return [part.value for part in device.values if isinstance(part, ast.FormattedValue)]
    return [device]
