"""DL021: the process group is not destroyed before the process exits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.run_order import MOST_STEPS, Run, found_in_runs, steps_calling
from drumline_lint.program.names import DESTROY, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import enclosing_function, is_called, last_name
from drumline_lint.reading.source import Source

RULE = rule("DL021", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Only in runs of scripts: a library with `setup()` and `cleanup()` leaves the calls to its
    users."""
    if framework(program, source) or next(program.calls(source, INIT), None) is None:
        return
    for call, name in found_in_runs(program, source, _never_destroyed).items():
        message = f"{name} is called, and nothing in this run calls destroy_process_group"
        yield RULE.at(source, call, message)


def _never_destroyed(program: Program, run: Run) -> Iterator[tuple[ast.AST, str]]:
    """The calls that begin a group, with what is called."""
    begun = [run[number].call for number in steps_calling(program, run, INIT)]
    if begun and not _may_be_destroyed(program, run):
        for call in begun:
            yield call, program.source_of(call).code(call.func)


def _may_be_destroyed(program: Program, run: Run) -> bool:
    """Whether the run calls it, or a file of the run names it where it may be called: not in an
    unused function."""
    if len(run) >= MOST_STEPS or steps_calling(program, run, DESTROY):
        return True
    sources = {program.source_of(step.call) for step in run}
    return any(
        last_name(node) == "destroy_process_group" and _may_be_called(program, node)
        for source in sources
        if "destroy_process_group" in source.text
        for node in (
            *program.index(source).every(ast.Attribute),
            *program.index(source).every(ast.Name),
        )
    )


def _may_be_called(program: Program, node: ast.expr) -> bool:
    function = enclosing_function(node)
    if (
        function is None
        or not is_called(node)
        or function.name.startswith("__")
        or function.decorator_list
    ):
        return True
    return _num_mentions(program, function.name) > 1


@cached_query
def _num_mentions(program: Program, name: str) -> int:
    word = re.compile(rf"\b{name}\b")
    texts = (source.text for source in program.sources if name in source.text)
    return sum(len(word.findall(text)) for text in texts)
