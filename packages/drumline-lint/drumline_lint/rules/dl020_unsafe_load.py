"""DL020: a file is trusted to run code."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL020", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where it is false whatever happens."""
    for call in program.calls(source, "torch.load"):
        option = argument(call, None, "weights_only")
        if option is not None and program.values(option) == {ConstantValue(False)}:
            path = argument(call, 0, "f")
            what = "a file" if path is None else source.code(path)
            yield RULE.at(source, option, f"{what} can run any code as it is loaded")
