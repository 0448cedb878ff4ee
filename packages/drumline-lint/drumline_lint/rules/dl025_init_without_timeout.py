"""DL025: the timeout of the process group does not fit."""

from __future__ import annotations

import ast
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
_LONG = ("map", "save_to_disk", "snapshot_download", "extractall", "download_and_prepare")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A timeout of a wrong type, and the default one where one rank works for long."""
    for call in program.calls(source, INIT):
        timeout = argument(call, 2, "timeout")
        values = [getattr(value, "value", None) for value in program.values(timeout)]
        if values and all(isinstance(value, int | float) for value in values):
            message = "timeout is a number, and must be a timedelta: this call raises a TypeError"
            yield RULE.at(source, call, message, severity=Severity.WARNING)
        if has_unknown_arguments(call) or program.values(timeout) - {ConstantValue(None)}:
            continue
        for work in _long_work_near(program, connected(program, source)):
            where = program.source_of(work)
            message = (
                f"{where.code(work.func)} runs on one rank while the others wait in a barrier, "
                "which fails after the default timeout"
            )
            yield RULE.at(where, work, message)
            break


@cached_query
def _long_work_near(program: Program, component: frozenset[Source]) -> list[ast.Call]:
    near = [file for file in program.sources if file in component]
    return [work for file in near for work in _long_work(program, file)]


def _long_work(program: Program, source: Source) -> Iterator[ast.Call]:
    """What prepares data on one rank, right before a barrier of all."""
    for branch in program.index(source).every(ast.If):
        following = rest_of_block(branch)[:1]
        waiting = [call for statement in following for call in nodes_in(statement, ast.Call)]
        is_waiting = any(
            called_name(call) == "barrier"
            and program.name_of(call.func) == "torch.distributed.barrier"
            for call in waiting
        )
        if is_waiting and any(test.is_main for test in rank_tests(program, branch.test)):
            for call in (call for part in branch.body for call in nodes_in(part, ast.Call)):
                inner = [call, *calls_made_in(program, call)]
                is_evaluation = "eval" in called_name(call)  # which is mostly short
                if not is_evaluation and any(map(_is_long, inner)):
                    yield call


def _is_long(call: ast.Call) -> bool:
    """Not Python's own `map`."""
    is_method = isinstance(call.func, ast.Attribute)
    return called_name(call) in _LONG and (is_method or called_name(call) != "map")
