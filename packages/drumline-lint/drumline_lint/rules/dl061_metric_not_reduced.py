"""DL061: a metric of one rank's part is taken for that of all samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_some_only
from drumline_lint.flow.loops import batch_loops, evaluation_loops
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part

RULE = rule("DL061", only_distributed=False, in_tests=False)
_REPORTS = {"print", "info", "log", "add_scalar", "write"}
_JOINING = re.compile(
    r"reduce|gather|broadcast|sync|across|collect|merge|aggregat|^compute$|average_over"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Evaluations over one rank's part of the data whose result nothing brings together, and sums
    of a part that are divided by the length of the whole."""
    if "rank" not in source.text.lower() and "Distributed" not in source.text:
        return
    if framework(program, source):
        return
    evaluations = evaluation_loops(program, source)
    for loop in evaluations:
        if _is_left_apart(program, loop) and _is_reported(program, loop):
            message = (
                "every rank evaluates its own part of the data, and nothing reduces the result "
                "over ranks: what rank 0 reports is the metric of its part"
            )
            yield RULE.at(source, _counting(loop)[0], message)
    for loop in batch_loops(program, source):
        if loop not in evaluations and _is_left_apart(program, loop):
            yield from _divisions(source, loop)


def _is_left_apart(program: Program, loop: Loop) -> bool:
    return (
        bool(_counting(loop))
        and goes_over_part(program, loop)
        and not is_on_some_only(program, loop)
        and not _is_joined(program, loop)
    )


def _divisions(source: Source, loop: Loop) -> Iterator[Finding]:
    """`total / len(dataset)` after a loop over a part of the dataset."""
    for division in nodes_in(scope_of(loop), ast.BinOp):
        divisor = division.right if isinstance(division.op, ast.Div) else None
        is_length = isinstance(divisor, ast.Call) and last_name(divisor.func) == "len"
        measured = divisor.args[0] if isinstance(divisor, ast.Call) and divisor.args else None
        is_whole = measured is not None and "dataset" in last_name(measured).lower()
        if is_length and is_whole and position(division) > position(loop):
            message = (
                f"the sum of this rank's part is divided by {source.code(division.right)}, "
                "which counts the samples of all ranks"
            )
            yield RULE.at(source, division, message)


def _counting(loop: Loop) -> list[ast.AST]:
    """Where something is added up or collected in it."""
    adding: list[ast.AST] = nodes_in(loop, ast.AugAssign)
    return adding + [call for call in nodes_in(loop, ast.Call) if last_name(call.func) == "append"]


def _is_reported(program: Program, loop: Loop) -> bool:
    """Whether it is known what becomes of the result: by its callers, or by what it prints."""
    function = enclosing_function(loop)
    if function is None or program.callers(function):
        return True
    names = {last_name(call.func).lower() for call in nodes_in(function, ast.Call)}
    return not names.isdisjoint(_REPORTS)


def _is_joined(program: Program, loop: Loop) -> bool:
    """Whether a name in the function, its class or its callers speaks of it."""
    function = enclosing_function(loop)
    places: list[ast.AST] = [program.source_of(loop).tree if function is None else function]
    if function is not None:
        owner = enclosing_class(function)
        places += [] if owner is None else [owner]
        callers = [enclosing_function(call) for call in program.callers(function)]
        places += [caller for caller in callers if caller is not None]
    return any(
        _JOINING.search(last_name(call.func).lower())
        for place in places
        for call in nodes_in(place, ast.Call, into_functions=True)
    )
