"""DL088: a schedule counts the batches of the whole dataset, and each rank makes its part of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import depends_on_rank, is_rank_or_count, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import called_name, calls_beside, scope_of
from drumline_lint.program.value import Values
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL088")

_OF_TORCH = "torch.optim.lr_scheduler."
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
        dataset = argument(sampler, 0, "dataset")
        data = _written(program, dataset)
        for schedule in (*calls_beside(sampler), *_schedules_elsewhere(program, sampler)):
            is_here = scope_of(schedule) is scope_of(sampler)
            made = frozenset() if is_here else program.values(dataset)
            count = _count_of(program, schedule, data if is_here else set(), made)
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


def _schedules_elsewhere(program: Program, sampler: ast.Call) -> Iterator[ast.Call]:
    """Torch's schedules in other functions of the program, where the batch size of the sampler's
    loader is that of one rank.

    For example:

        def make_schedule(optimizer, num_samples, batch_size):
            return OneCycleLR(optimizer, 0.1, total_steps=num_samples // batch_size)
    """
    for loader in program.calls(program.source_of(sampler), LOADER):
        makers = [
            value.call for value in program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
        ]
        if sampler in makers and depends_on_rank(program, given(loader, "batch_size")):
            return

    for source in program.sources:
        if "lr_scheduler" in source.text:
            for calls in program.index(source).calls.values():
                for call in calls:
                    is_beside = scope_of(call) is scope_of(sampler)
                    if not is_beside and program.name_of(call.func).startswith(_OF_TORCH):
                        yield call


def _written(program: Program, data: ast.expr | None) -> set[str]:
    """What a dataset may be, as it is written: `{"MNIST(root)"}`."""
    return {ast.unparse(origin) for origin in written_values(program, data)}


def _count_of(
    program: Program, schedule: ast.Call, data: set[str], made: Values
) -> ast.expr | None:
    """The number of batches of this data, if a call makes a schedule as long.

    It is `len(data) // 32` here:

        num_steps = len(data) // 32 * epochs
        schedule = get_cosine_schedule(optimizer, num_steps)
    """
    if not _SCHEDULE.search(called_name(schedule)):
        return None

    for value in (*schedule.args, *(keyword.value for keyword in schedule.keywords)):
        inner = list(parts(program, value, _is_length))
        if any(is_rank_or_count(program, part) for part in inner):
            continue

        for part in inner:
            if _is_count(program, part, data, made):
                return part
    return None


def _is_length(part: ast.expr) -> bool:
    """`len(data)`, whatever the data is made of."""
    return isinstance(part, ast.Call) and called_name(part) == "len"


def _is_count(program: Program, part: ast.expr, data: set[str], made: Values) -> bool:
    """`len(data) // batch_size`, of a dataset that is written so, or is what was made there."""
    if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.FloorDiv | ast.Div):
        return False

    for length in written_values(program, part.left) if made else [part.left]:
        if isinstance(length, ast.Call) and _is_length(length):
            for value in length.args:
                if data & _written(program, value) or made & program.values(value):
                    return True

    return False
