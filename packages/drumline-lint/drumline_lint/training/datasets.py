"""What a DataLoader reads: samples that a sampler chooses by their index, or a stream."""

from __future__ import annotations

import ast

from drumline_lint.program.origins import written
from drumline_lint.program.program import Program
from drumline_lint.program.value import Instance, Made, Several

# Of these it is known that they are indexed, and know nothing of ranks.
_INDEXED = (
    "datasets.load_from_disk",
    "torch.utils.data.ConcatDataset",
    "torch.utils.data.Subset",
    "torch.utils.data.TensorDataset",
    "torch.utils.data.random_split",
    "torchvision.datasets.",
)


def is_indexed(program: Program, dataset: ast.expr | None) -> bool:
    """Whether it is known to be a dataset that a sampler chooses from."""
    values = program.values(dataset)
    if any(isinstance(value, Instance) for value in values):
        return all(_has_indexes(program, value.of) for value in values if isinstance(value, Instance))
    if any(isinstance(value, Several) for value in values):
        return True
    names = [value.name for value in values if isinstance(value, Made)]
    names += [program.name_of(one.func) for one in written(program, dataset) if isinstance(one, ast.Call)]
    return bool(names) and all(name.startswith(_INDEXED) for name in names)


def _has_indexes(program: Program, node: ast.ClassDef) -> bool:
    ancestry = program.ancestry(node)
    if any(isinstance(place, str) and place.rpartition(".")[2] == "IterableDataset" for place in ancestry):
        return False
    if program.method(node, "__getitem__") is not None:
        return True
    return any(isinstance(place, str) and place.startswith(_INDEXED) for place in ancestry)
