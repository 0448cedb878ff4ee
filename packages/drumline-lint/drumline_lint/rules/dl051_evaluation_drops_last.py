"""DL051: an evaluation leaves out the last samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import evaluation_loops
from drumline_lint.program.calls import argument
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import enclosing_function, last_name, parent_of
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders, training_loops

RULE = rule("DL051", in_tests=False)
_WORDS = {"val", "valid", "validation", "eval", "evaluation", "test"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders of an evaluation with `drop_last=True`, by their loop or by their name."""
    for call in program.calls(source, LOADER):
        option = given(call, "drop_last")
        is_dropping = option is not None and program.values(option) == {ConstantValue(True)}
        if is_dropping and _is_of_evaluation(program, call):
            message = "drop_last=True leaves out samples of every rank from the evaluation"
            yield RULE.at(source, argument(call, None, "drop_last") or call, message)


def _is_of_evaluation(program: Program, call: ast.Call) -> bool:
    if training_loops(program).get(call):
        return False
    if call in _evaluated(program):
        return True
    statement = parent_of(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    name = "" if target is None else last_name(target)
    return not _WORDS.isdisjoint(name.lower().split("_")) and _is_used(program, target)


def _is_used(program: Program, target: ast.expr | None) -> bool:
    """Not a name in a function that is never read; other files may read any other."""
    if not isinstance(target, ast.Name) or enclosing_function(target) is None:
        return True
    mentions = program.index(program.source_of(target)).every(ast.Name)
    return any(
        isinstance(mention.ctx, ast.Load) and mention.id == target.id for mention in mentions
    )


@cached_query
def _evaluated(program: Program) -> set[ast.Call]:
    return {
        loader
        for source in program.sources
        for loop in evaluation_loops(program, source)
        if isinstance(loop, ast.For | ast.AsyncFor)
        for loader in loaders(program, loop.iter)
    }
