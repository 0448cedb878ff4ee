"""DL057: a worker process of a DataLoader calls a collective."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in, short_name
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class
from drumline_lint.program.value import Function
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL057")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives in what a dataset or a loader with workers runs for each sample."""
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
        bases = [] if owner is None else [str(place) for place in program.ancestry(owner)]
        is_dataset = any(base.endswith("Dataset") for base in bases)
        if is_dataset and function.name in ("__getitem__", "__getitems__"):
            yield function
    for call in program.calls(source, LOADER):
        workers = given(call, "num_workers")
        if isinstance(workers, ast.Constant) and workers.value == 0:
            continue
        for option in ("collate_fn", "worker_init_fn"):
            for value in program.values(given(call, option)):
                node = value.node if isinstance(value, Function) else None
                if isinstance(node, ast.FunctionDef) and program.source_of(node) is source:
                    yield node
