"""DL025: the timeout of the process group does not fit.

It is of a wrong type, or it is the default one, 10 minutes with NCCL, while one rank prepares data
for longer and the others wait for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import rank_tests, rest_of_block
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import called_name, nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL025")
# They go through a whole dataset.
# `takes up to 24 hours` and `All files; about three hours`, and not `files from the last 24 hours`.
_QUANTITY = (
    r"(?:an?|at|least|most|few|some|many|several|about|around|roughly|up|to|or|more|less|than|over|"
    r"one|two|three|four|five|six|seven|eight|nine|ten|twelve|half|[~\d][\d.,-]*)"
)
_HOURS = re.compile(
    r"(?:\b(?:takes?|needs?)|(?:\A|(?<=\n\n)|[.;:(] ?)(?:about|around|roughly|up to|several))"
    rf"(?: {_QUANTITY}){{0,6}} hours?\b(?! of\b)",
    re.IGNORECASE,
)
_LONG = ("map", "save_to_disk", "snapshot_download", "extractall", "download_and_prepare")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A timeout of a wrong type, and the default one where one rank works for long.

    dist.init_process_group("nccl", timeout=1800)  # TypeError: not a timedelta
    """
    for init in program.calls(source, INIT):
        timeout = program.values(argument(init, 2, "timeout"))
        values = [getattr(value, "value", None) for value in timeout]
        if values and all(isinstance(value, int | float) for value in values):
            message = "timeout is a number, and must be a timedelta: this call raises a TypeError"
            yield RULE.at(source, init, message, severity=Severity.WARNING)

        if has_unknown_arguments(init) or timeout - {ConstantValue(None)}:
            continue

        for work in _long_work_near(program, connected(program, source))[:1]:
            where = program.source_of(work)
            message = (
                f"{where.code(work.func)} runs on one rank while the others wait in a barrier, "
                "which fails after the default timeout"
            )
            is_said = _takes_hours(program, work)
            severity = Severity.WARNING if is_said else None
            yield RULE.at(where, work, message, severity=severity)


@cached_query
def _long_work_near(program: Program, component: frozenset[Source]) -> list[ast.Call]:
    """The long work in these files, in the order in which they were given.

    The group is often made in one file, and the data prepared in another.
    """
    near = [file for file in program.sources if file in component]
    return [work for file in near for work in _long_work(program, file)]


def _long_work(program: Program, source: Source) -> Iterator[ast.Call]:
    """What prepares data on one rank, right before a barrier of all.

    if rank == 0:
        dataset.map(tokenize).save_to_disk(path)
    dist.barrier()
    """
    for branch in program.index(source).every(ast.If):
        if not _is_before_barrier(program, branch):
            continue
        if not any(test.is_main for test in rank_tests(program, branch.test)):
            continue

        for statement in branch.body:
            for call in nodes_in(statement, ast.Call):
                if "eval" in called_name(call):
                    continue  # mostly short
                is_long = any(map(_is_long, (call, *calls_made_in(program, call))))
                if is_long or _takes_hours(program, call):
                    yield call


def _takes_hours(program: Program, call: ast.Call) -> bool:
    """Whether the docstring of the function says so: `about three hours for all files`."""
    function = program.function_of(call)
    text = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None
    return text is not None and _HOURS.search(text) is not None


def _is_before_barrier(program: Program, branch: ast.If) -> bool:
    """Whether the next statement waits for all ranks: `dist.barrier()`."""
    for statement in rest_of_block(branch)[:1]:
        for call in nodes_in(statement, ast.Call):
            if program.name_of(call.func) == "torch.distributed.barrier":
                return True

    return False


def _is_long(call: ast.Call) -> bool:
    """Whether it goes through a whole dataset.

    Examples: `dataset.map(tokenize)`, `snapshot_download(name)`; not Python's own `map`.
    """
    name = called_name(call)
    is_method = isinstance(call.func, ast.Attribute)
    return name in _LONG and (is_method or name != "map")
