"""DL081: every worker of a DataLoader yields the same samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.tree import nodes_in
from drumline_lint.program.value import ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given

RULE = rule("DL081", only_distributed=False, in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders with workers over an IterableDataset that does not ask which worker it is."""
    for call in program.calls(source, LOADER):
        workers = given(call, "num_workers")
        constants = program.values(workers)
        if workers is None or not constants or ConstantValue(0) in constants:
            continue
        classes = [
            value.of
            for value in program.values(given(call, "dataset"))
            if isinstance(value, Instance)
        ]
        is_repeated = bool(classes) and all(_repeats(program, owner) for owner in classes)
        if any_text_near(program, source, "load_dataset", "webdataset"):
            continue  # these divide their shards among workers themselves
        if is_repeated and given(call, "worker_init_fn") is None:
            message = (
                f"each worker of this loader goes over all that {classes[0].name} yields: "
                "every sample comes once for each of them"
            )
            yield RULE.at(source, call, message)


def _repeats(program: Program, owner: ast.ClassDef) -> bool:
    """Whether it is a stream that ends, and that does not speak of workers."""
    ancestry = program.ancestry(owner)
    bases = [place for place in ancestry if isinstance(place, str)]
    classes = [place for place in ancestry if not isinstance(place, str)]
    iterating = program.method(owner, "__iter__")
    if iterating is None or not bases or not all(base.endswith(_BASES) for base in bases):
        return False
    is_endless = any(isinstance(loop.test, ast.Constant) for loop in nodes_in(iterating, ast.While))
    return not is_endless and not any(_knows_workers(program, place) for place in classes)


def _knows_workers(program: Program, owner: ast.ClassDef) -> bool:
    source = program.source_of(owner)
    is_named = "worker_info" in source.text or "worker_id" in source.text
    return is_named or "worker" in source.code(owner).lower()


_BASES = ("IterableDataset", "Generic", "ABC")
