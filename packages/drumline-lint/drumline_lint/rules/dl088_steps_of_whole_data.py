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
    """`len(data) // batch_size` in what a schedule is given, where a sampler divides the data."""
    for sampler in (
        program.calls(source, DISTRIBUTED_SAMPLER) if not framework(program, source) else ()
    ):
        data = _written(program, argument(sampler, 0, "dataset"))
        for schedule in calls_beside(sampler):
            counts = [
                count
                for value in (*schedule.args, *(keyword.value for keyword in schedule.keywords))
                if _SCHEDULE.search(called_name(schedule)) and not depends_on_rank(program, value)
                for count in parts(program, value)
                if _is_count(program, count, data)
            ]
            if counts:
                where = program.source_of(counts[0])
                message = (
                    f"the schedule counts {where.code(counts[0])} batches, those of all ranks: "
                    "it is still at its beginning when the training ends"
                )
                is_here = scope_of(counts[0]) is scope_of(schedule)
                yield RULE.at(
                    source if is_here else where, schedule if is_here else counts[0], message
                )


def _written(program: Program, data: ast.expr | None) -> set[str]:
    return {ast.unparse(origin) for origin in written_values(program, data)}


def _is_count(program: Program, part: ast.expr, data: set[str]) -> bool:
    """`len(data) // batch_size`"""
    if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.FloorDiv | ast.Div):
        return False
    length = part.left
    values = length.args if isinstance(length, ast.Call) and called_name(length) == "len" else []
    return any(data & _written(program, value) for value in values)
