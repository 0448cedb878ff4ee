"""DL035: deprecated names of mixed precision."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors
from drumline_lint.reading.source import Source

RULE = rule("DL035")
_OLD = tuple(
    f"torch.{device}.amp.{name}"
    for device in ("cuda", "cpu")
    for name in ("autocast", "GradScaler")
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls, but for those that another version of torch needs."""
    for call in program.calls(source, *_OLD):
        is_fallback = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call))
        tests = [ast.unparse(test).lower() for test, _ in conditions(program, call)]
        if not is_fallback and not any("version" in test or "hasattr" in test for test in tests):
            _, device, _, last = program.name_of(call.func).split(".")
            message = f"{source.code(call.func)} is deprecated since torch 2.4"
            yield RULE.at(source, call, message, fix=f'write torch.amp.{last}("{device}", ...)')
