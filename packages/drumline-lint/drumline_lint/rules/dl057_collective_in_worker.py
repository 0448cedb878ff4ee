"""DL057: a worker process of a DataLoader calls a collective."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in, short_name
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class, source_of
from drumline_lint.program.value import ConstantValue, Function
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL057")
_OF_SAMPLES = ("__getitem__", "__getitems__")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives in what a dataset or a loader runs for each sample."""
    for function in _run_by_workers(program, source):
        for name, chain in collectives_in(program, function):
            message = (
                f"{short_name(name)} is called in a worker process of the DataLoader, "
                "which is no rank: it blocks or fails"
            )
            yield RULE.at(source, chain[0], message)


def _run_by_workers(program: Program, source: Source) -> Iterator[ast.FunctionDef]:
    for function in program.index(source).every(ast.FunctionDef):
        owner = enclosing_class(function)
        if function.name in _OF_SAMPLES and owner is not None and _is_dataset(program, owner):
            yield function
    for call in program.calls(source, LOADER):
        if program.values(given(call, "num_workers")) == {ConstantValue(0)}:
            continue
        for option in ("collate_fn", "worker_init_fn"):
            for value in program.values(given(call, option)):
                function = value.node if isinstance(value, Function) else None
                if isinstance(function, ast.FunctionDef) and source_of(function) is source:
                    yield function


def _is_dataset(program: Program, owner: ast.ClassDef) -> bool:
    names = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return any(name.endswith("Dataset") for name in names)
