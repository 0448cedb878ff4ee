"""DL004: both shuffle and a sampler set the order of the samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import LOADER
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL004")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Both in one call: shuffle true in any case, the sampler something that is known not to be
    None."""
    for call in program.calls(source, LOADER):
        sampler = given(call, "sampler")
        is_there = sampler is not None and _is_there(program, sampler)
        if is_there and _is_stream(program, given(call, "dataset")):
            message = "an IterableDataset takes no sampler: DataLoader raises a ValueError"
            yield RULE.at(source, call, message, fix="divide the data by rank in its __iter__")
        if not _is_true(program, given(call, "shuffle")):
            continue
        for name in ("sampler", "batch_sampler"):
            sampler = given(call, name)
            if sampler is not None and _is_there(program, sampler):
                option = f"{name}={source.code(sampler)}"
                yield RULE.at(
                    source, call, f"shuffle=True beside {option}: DataLoader raises a ValueError"
                )
                break


def _is_stream(program: Program, dataset: ast.expr | None) -> bool:
    classes = [value.of for value in program.values(dataset) if isinstance(value, Instance)]
    return bool(classes) and all(
        any(str(base).endswith("IterableDataset") for base in program.ancestry(owner))
        for owner in classes
    )


def _is_true(program: Program, shuffle: ast.expr | None) -> bool:
    origins = written_values(program, shuffle)
    return bool(origins) and all(
        isinstance(origin, ast.Constant) and origin.value is True for origin in origins
    )


def _is_there(program: Program, sampler: ast.expr) -> bool:
    """Whether it is made somewhere; beside a shuffle that is always on, one None among others does
    not help."""
    if any(value != ConstantValue(None) for value in program.values(sampler)):
        return True
    return any(isinstance(origin, ast.Call) for origin in written_values(program, sampler))
