"""DL013: DDP looks for unused parameters, and a reentrant checkpoint runs the forward pass twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import calls_near
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL013")
POSITION = 8


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where both are known."""
    for call in program.calls(source, DDP):
        option = argument(call, POSITION, "find_unused_parameters")
        is_on = option is not None and program.values(option) == {ConstantValue(True)}
        reentrant = _reentrant(program, source) if is_on else None
        if reentrant is not None:
            message = (
                f"{program.source_of(reentrant).code(reentrant.func)} runs the forward pass "
                "again in the backward pass, and DDP then marks parameters as ready twice: "
                "that raises a RuntimeError"
            )
            yield RULE.at(source, call, message)


def _reentrant(program: Program, source: Source) -> ast.Call | None:
    """A checkpointing that is certain to be reentrant."""
    for call in calls_near(program, source, "torch.utils.checkpoint.checkpoint"):
        if program.values(argument(call, None, "use_reentrant")) == {ConstantValue(True)}:
            return call
    return None
