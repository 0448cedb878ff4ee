"""DL009: the weights that training begins with are drawn without a seed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.run_order import Run, found_in_runs
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.models import built_at, wrapping_steps, wraps_any
from drumline_lint.training.seeds import seeded_before

RULE = rule("DL009")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models that are wrapped in runs without any seed."""
    if framework(program, source) or not wraps_any(program):
        return
    for call in found_in_runs(program, source, _unseeded):
        yield RULE.at(
            source,
            call,
            f"{source.code(call)} wraps a model whose weights are drawn without a seed",
        )


def _unseeded(program: Program, run: Run) -> Iterator[tuple[ast.AST, None]]:
    every = wrapping_steps(program, run)
    if every and not seeded_before(program, run, len(run)):
        for number in every:
            if built_at(program, run, number) is not None:
                yield run[number].call, None
