"""DL033: samples that the last batch repeats are counted twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import evaluation_loops
from drumline_lint.program.names import ACCELERATOR
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, ancestors, last_name, nodes_in
from drumline_lint.reading.source import Source

RULE = rule("DL033", only_distributed=False)
_NUMBERS = re.compile(r"(^|_)(ind(ex|ices|ic)|idx|idxs|ids?|sample_nums?)(_|\d|$)")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`accelerator.gather` in an evaluation."""
    calls = list(program.calls(source, f"{ACCELERATOR}.gather"))
    for loop in evaluation_loops(program, source) if calls else ():
        for call in calls:
            if loop in ancestors(call) and not _cuts(loop) and not _has_numbers(loop, calls):
                message = f"{source.code(call.func)} keeps the samples that the last batch repeats"
                yield RULE.at(source, call, message)


def _cuts(loop: Loop) -> bool:
    """Whether something is cut off: `predictions[: len(dataset) - seen]`."""
    return any(part.upper is not None for part in nodes_in(loop, ast.Slice))


def _has_numbers(loop: Loop, gathered: list[ast.Call]) -> bool:
    """Whether the numbers of the samples are gathered as well: by them a reader drops the repeats."""
    inputs = [call.args[0] for call in gathered if loop in ancestors(call) and call.args]
    return any(_NUMBERS.search(last_name(value).lower()) for value in inputs)
