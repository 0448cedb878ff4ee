"""DL008: a rank is used as the number of a GPU that is not there.

The global rank of the second host begins at 8 where its GPUs begin at 0. A process that sees one
GPU has no other than number 0.
"""

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
    """Ranks that are no number of a visible GPU.

    Looked at are `set_device`, `torch.device`, `.to`, `.cuda` and DDP's `device_ids`; the first of
    each line is reported.
    """
    yield from _narrowed(program, source)

    reported_lines = set[int]()
    for number in _numbers(program, source):
        kinds = {value.kind for value in program.values(number) if isinstance(value, Rank)}
        if number.lineno in reported_lines:
            continue

        finding = None
        if kinds == {"local"}:
            finding = _of_local_rank(program, source, number)
        elif kinds == {"global"}:
            finding = _of_global_rank(program, source, number)

        if finding is not None:
            reported_lines.add(number.lineno)
            yield finding


def _numbers(program: Program, source: Source) -> Iterator[ast.expr]:
    """What stands for the number of a GPU: `rank` in `model.to(rank)` and in `f"cuda:{rank}"`.

    A device that is an expression by itself stands for its own number.
    """
    for device in devices_given(program, source):
        if isinstance(device, ast.JoinedStr):
            for part in device.values:
                if isinstance(part, ast.FormattedValue):
                    yield part.value
        else:
            yield device


# The global rank.


def _of_global_rank(program: Program, source: Source, number: ast.expr) -> Finding | None:
    """The finding at a rank among all hosts: `torch.cuda.set_device(dist.get_rank())`.

    It is a warning where several hosts are seen, which is where it fails.
    """
    if program.source_of(number) is not source:
        return None
    # a parameter of which no caller is seen may be the number of a process of mp.spawn
    if any(isinstance(origin, ast.Name) for origin in written_values(program, number)):
        return None

    for value in previous_values(program, number):
        if value is not None and are_exclusive(program, value, number):
            return None  # it is the global rank in another branch

    message = f"{source.code(number)} is the rank among all hosts, not a GPU of this one"
    severity = Severity.WARNING if has_several_nodes(program, source) else None
    return RULE.at(source, number, message, severity=severity)


# Processes that see one GPU.


def _of_local_rank(program: Program, source: Source, number: ast.expr) -> Finding | None:
    """The finding at a local rank, if Slurm shows each task one GPU.

    The script has `srun --gpus-per-task=1`, the program `torch.cuda.set_device(local_rank)`.
    """
    if not _is_alone_with_gpu(program, source):
        return None

    message = (
        f"--gpus-per-task=1 shows each task one GPU, which is cuda:0 there: "
        f"{source.code(number)} is none but on the first task"
    )
    fix = "choose cuda:0, or ask for --gpus-per-node"
    return RULE.at(source, number, message, fix=fix, severity=Severity.WARNING)


def _is_alone_with_gpu(program: Program, source: Source) -> bool:
    """Whether all scripts that start it show each of several tasks on a node its own GPU.

    srun --ntasks-per-node=8 --gpus-per-task=1 python train.py
    """
    started = program.launches_of(source)
    return bool(started) and all(
        launch.kind == PYTHON and sees_one_gpu(launch) and (tasks_per_node(launch) or 1) > 1
        for launch in started
    )


def _narrowed(program: Program, source: Source) -> Iterator[Finding]:
    """Processes that hide all GPUs but one from themselves, and then choose one by the rank.

    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    model.to(rank)
    """
    for setting in settings(program, source):
        if setting.name != "CUDA_VISIBLE_DEVICES" or any(conditions(program, setting.node)):
            continue
        if not any(is_rank(program, part) for part in parts(program, setting.value)):
            continue

        number = _always_used_rank(program, source)
        if number is not None:
            message = (
                "each process then sees one GPU, which is cuda:0 there: "
                f"{source.code(number)} is none but on the first rank"
            )
            fix = "leave CUDA_VISIBLE_DEVICES alone, or choose cuda:0"
            yield RULE.at(source, setting.node, message, fix=fix, severity=Severity.WARNING)


def _always_used_rank(program: Program, source: Source) -> ast.expr | None:
    """The first rank that chooses a GPU, whatever the options are."""
    for number in _numbers(program, source):
        if is_rank(program, number) and not any(conditions(program, number)):
            return number
    return None
