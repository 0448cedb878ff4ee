"""DL013: DDP looks for unused parameters at every step."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL013")
POSITION = 8


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where it is known to be true; what is a setting may be as meant."""
    for call in program.calls(source, DDP):
        option = argument(call, POSITION, "find_unused_parameters")
        if option is not None and program.values(option) == {ConstantValue(True)}:
            yield RULE.at(
                source,
                call,
                f"{source.code(call.func)} searches the graph for unused parameters at every step",
            )
