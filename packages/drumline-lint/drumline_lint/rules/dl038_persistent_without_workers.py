"""DL038: options for worker processes, and no worker processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import has_unknown_arguments
from drumline_lint.program.names import LOADER
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL038")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where the number of workers is known to be 0."""
    for call in program.calls(source, LOADER):
        if has_unknown_arguments(call) or not _has_no_workers(program, call):
            continue
        persistent = given(call, "persistent_workers")
        ahead = given(call, "prefetch_factor")
        if persistent is not None and _constants(program, persistent) == [True]:
            yield RULE.at(source, call, f"persistent_workers=True with {_message(source, call)}")
        elif ahead is not None and all(
            _is_number(value) for value in _constants(program, ahead) or [None]
        ):
            yield RULE.at(
                source, call, f"prefetch_factor={source.code(ahead)} with {_message(source, call)}"
            )


def _has_no_workers(program: Program, call: ast.Call) -> bool:
    workers = given(call, "num_workers")
    return workers is None or all(
        _is_number(value) and value == 0 for value in _constants(program, workers) or [None]
    )


def _constants(program: Program, expression: ast.expr) -> list[object]:
    origins = written_values(program, expression)
    if not all(isinstance(origin, ast.Constant) for origin in origins):
        return []
    return list({origin.value for origin in origins if isinstance(origin, ast.Constant)})


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _message(source: Source, call: ast.Call) -> str:
    workers = given(call, "num_workers")
    workers_text = "no num_workers" if workers is None else f"num_workers={source.code(workers)}"
    return f"{workers_text}: DataLoader raises a ValueError"
