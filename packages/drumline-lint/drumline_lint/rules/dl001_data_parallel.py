"""DL001: every rank drives the GPUs of all."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.shown import is_shown_on_every_rank
from drumline_lint.program.names import DATA_PARALLEL
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL001")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every call that all ranks come to."""
    for call in program.calls(source, DATA_PARALLEL):
        if is_shown_on_every_rank(program, call) and not _is_by_gpus(program, call):
            message = (
                f"{source.code(call.func)} drives all GPUs from one process, and every rank does so"
            )
            yield RULE.at(source, call, message)


def _is_by_gpus(program: Program, call: ast.Call) -> bool:
    """Under `if args.n_gpu > 1:`, which is often 1 for each rank."""
    tests = [ast.unparse(test).lower() for test, _ in conditions(program, call)]
    return any("gpu" in test or "device_count" in test for test in tests)
