"""DL021: the process group is not destroyed before the process exits."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL021", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Groups of programs whose files nowhere name `destroy_process_group`."""
    if framework(program, source) or any_text_near(program, source, "destroy_process_group"):
        return
    for call in program.calls(source, INIT):
        name = source.code(call.func)
        message = f"{name} is called, and nothing in this program calls destroy_process_group"
        yield RULE.at(source, call, message)
