"""DL001: one process for all GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import DATA_PARALLEL
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL001", only_distributed=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    for call in program.calls(source, DATA_PARALLEL):
        yield RULE.at(source, call, f"{source.code(call.func)} drives all GPUs from one process")
