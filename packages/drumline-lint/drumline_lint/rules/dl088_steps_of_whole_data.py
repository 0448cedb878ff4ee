"""DL088: a schedule counts the batches of the whole dataset, and each rank makes its part of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER
from drumline_lint.program.origins import depends_on_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import called_name, calls_beside, scope_of
from drumline_lint.reading.source import Source

RULE = rule("DL088")

_SCHEDULE = re.compile(r"sched|cosine|warm_?up|onecycle|linearlr|polynomiallr", re.IGNORECASE)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A schedule that is given the number of batches of all data, where a sampler divides the data.

    For example:

        sampler = DistributedSampler(data)
        schedule = CosineAnnealingLR(optimizer, len(data) // batch_size * epochs)
    """
    if framework(program, source):
        return

    for sampler in program.calls(source, DISTRIBUTED_SAMPLER):
        data = _written(program, argument(sampler, 0, "dataset"))
        for schedule in calls_beside(sampler):
            count = _count_of(program, schedule, data)
            if count is None:
                continue

            where = program.source_of(count)
            message = (
                f"the schedule counts {where.code(count)} batches, those of all ranks: "
                "it is still at its beginning when the training ends"
            )
            if scope_of(count) is scope_of(schedule):
                yield RULE.at(source, schedule, message)
            else:
                yield RULE.at(where, count, message)


def _written(program: Program, data: ast.expr | None) -> set[str]:
    """What a dataset may be, as it is written: `{"MNIST(root)"}`."""
    return {ast.unparse(origin) for origin in written_values(program, data)}


def _count_of(program: Program, schedule: ast.Call, data: set[str]) -> ast.expr | None:
    """The number of batches of this data, if a call makes a schedule as long.

    It is `len(data) // 32` here:

        num_steps = len(data) // 32 * epochs
        schedule = get_cosine_schedule(optimizer, num_steps)
    """
    if not _SCHEDULE.search(called_name(schedule)):
        return None

    for value in (*schedule.args, *(keyword.value for keyword in schedule.keywords)):
        if depends_on_rank(program, value):
            continue

        for part in parts(program, value):
            if _is_count(program, part, data):
                return part
    return None


def _is_count(program: Program, part: ast.expr, data: set[str]) -> bool:
    """`len(data) // batch_size`"""
    if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.FloorDiv | ast.Div):
        return False

    length = part.left
    if not isinstance(length, ast.Call) or called_name(length) != "len":
        return False
    return any(data & _written(program, value) for value in length.args)
