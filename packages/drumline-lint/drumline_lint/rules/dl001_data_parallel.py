"""DL001: one process for all GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.names import DATA_PARALLEL
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL001", only_distributed=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where every rank comes to it, each drives the GPUs of all."""
    for call in program.calls(source, DATA_PARALLEL):
        message = f"{source.code(call.func)} drives all GPUs from one process"
        is_of_ranks = (
            source in distributed_sources(program)
            and is_on_every_rank(program, call)
            and not _is_by_gpus(program, call)
        )
        if is_of_ranks:
            message += ", and every rank does so"
        yield RULE.at(source, call, message, severity=Severity.WARNING if is_of_ranks else None)


def _is_by_gpus(program: Program, call: ast.Call) -> bool:
    """Under `if args.n_gpu > 1:`, which is often 1 for each rank."""
    tests = [ast.unparse(test).lower() for test, _ in conditions(program, call)]
    return any("gpu" in test or "device_count" in test for test in tests)
