"""DL003: every rank trains on the same samples.

A DataLoader is reported if three things are known: a loop that trains goes over it, nothing that
it is given depends on the rank, and every rank of a distributed run comes to it. Datasets of
unknown libraries may divide themselves, so only those whose code or name is known count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import are_exclusive
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.flow.guards import is_single_process, may_be_guarded
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import depends_on_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    called_name,
    calls_beside,
    dotted,
    is_after,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import CallResult, ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, is_divided_loader, stream_classes, training_loops

RULE = rule("DL003")
_PLAIN = {
    f"torch.utils.data.{name}Sampler"
    for name in ("Random", "Sequential", "SubsetRandom", "WeightedRandom")
}
# Of these it is known that they are indexed, and know nothing of ranks.
_INDEXED = tuple(
    "datasets.load_from_disk torch.utils.data.ConcatDataset torch.utils.data.Subset "
    "torch.utils.data.TensorDataset torch.utils.data.random_split torchvision.datasets.".split()
)
_OF_RANKS = ("rank", "world", "replica", "process_index", "torch.distributed", "dist.")
# Of a constant, or of what the dataset was given: that it depends on the rank is asked elsewhere.
_SAME_SEED = re.compile(
    r"(random|seed|default_rng|randomstate)\((\d+|(self\.)?(seed|epoch)( \+ (self\.)?(seed|epoch))?)\)"
)
_DIVIDING = ("rank", "world", "shard", "split", "replica", "skip")
_DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders that feed a training loop with the same samples on all ranks.

    for batch in DataLoader(data, shuffle=True):
        model(batch).sum().backward()
    """
    for loader in program.calls(source, LOADER):
        dataset = given(loader, "dataset")
        loops = training_loops(program).get(loader)
        if dataset is None or not loops:
            continue
        if not _gives_all(program, loader, dataset) or not _is_for_all(program, loader, loops):
            continue

        message = f"every rank trains on all of {source.code(dataset)}: no sampler splits it"
        yield RULE.at(source, loader, message, severity=_severity(program, source, loader))


def _severity(program: Program, source: Source, loader: ast.Call) -> Severity | None:
    """How sure it is that the ranks should not read the same data.

    A program that names a DistributedSampler may divide this data elsewhere. Without a seed, each
    rank shuffles in an order of its own, which is a larger batch at random.
    """
    has_samplers = any_text_near(program, source, "DistributedSampler")
    if has_samplers or not is_of_ranks(program, source):
        return Severity.NOTE

    if _is_shuffled(program, loader) and not any_text_near(program, source, "seed"):
        return Severity.WARNING
    return None


# What the loader is given.


def _gives_all(program: Program, loader: ast.Call, dataset: ast.expr) -> bool:
    """Whether nothing in the call, nor in the dataset, has to do with ranks.

    `DataLoader(data, shuffle=True)` does; `DataLoader(Shard(path, rank))` does not, nor does a
    loader with `**options`, which may have a sampler.
    """
    samplers = [given(loader, "sampler"), given(loader, "batch_sampler")]
    if has_unknown_arguments(loader) or not all(_is_plain(program, part) for part in samplers):
        return False

    # shuffle=True is refused for a dataset that can only be iterated over
    is_ordered = any(samplers) or _is_shuffled(program, loader)
    if not is_ordered and not _is_indexed(program, dataset) and not _is_stream(program, dataset):
        return False

    for owner in _classes(program, dataset):
        text = program.source_of(owner).code(owner)
        if "rank" in text or "world_size" in text:
            return False

    functions = [given(loader, "worker_init_fn"), given(loader, "collate_fn")]
    return not any(depends_on_rank(program, part) for part in (dataset, *samplers, *functions))


def _is_shuffled(program: Program, loader: ast.Call) -> bool:
    """Whether the ranks may draw different samples: `DataLoader(data, shuffle=True)`."""
    return ConstantValue(True) in program.values(given(loader, "shuffle"))


def _is_plain(program: Program, sampler: ast.expr | None) -> bool:
    """Whether there is no sampler, or one that gives every rank the same samples.

    A sampler with several origins, `sampler = RandomSampler(data) if shuffle else None`, is plain
    if all of them are.
    """
    return all(_makes_plain(program, origin) for origin in written_values(program, sampler))


def _makes_plain(program: Program, origin: ast.expr) -> bool:
    """Whether it is a sampler of torch that knows nothing of ranks.

    Examples: `None`, `RandomSampler(data)`, `BatchSampler(RandomSampler(data), 16)`.
    """
    if isinstance(origin, ast.Constant):
        return origin.value is None
    if not isinstance(origin, ast.Call):
        return False

    # several, where the class is chosen from a dictionary
    names = {getattr(value, "name", "") for value in program.values(origin.func)}
    if names and names <= _PLAIN:
        return True

    if program.name_of(origin.func) != "torch.utils.data.BatchSampler":
        return False

    sampler = argument(origin, 0, "sampler")
    return sampler is not None and _is_plain(program, sampler)


# The dataset.


def _classes(program: Program, dataset: ast.expr) -> list[ast.ClassDef]:
    """The classes of the given files that it may be an instance of.

    data = Images(root)
    loader = DataLoader(data)  # Images
    """
    return [value.of for value in program.values(dataset) if isinstance(value, Instance)]


def _is_indexed(program: Program, dataset: ast.expr) -> bool:
    """Whether it is known to be a dataset that a sampler chooses from.

    Examples: `TensorDataset(images)`, and an instance of a class with `__getitem__`.
    """
    classes = _classes(program, dataset)
    names = [value.name for value in program.values(dataset) if isinstance(value, CallResult)]
    if not classes and not names:
        return False

    streams = stream_classes(program, dataset)
    for owner in classes:
        if owner in streams or program.method(owner, "__getitem__") is None:
            return False
    return all(name.startswith(_INDEXED) for name in names)


def _is_stream(program: Program, dataset: ast.expr) -> bool:
    """Whether it is an IterableDataset that reads a file, and neither divides nor draws.

    class Lines(IterableDataset):
        def __iter__(self):
            yield from open(self.path)
    """
    if any(_is_streamed(program, part) for part in parts(program, dataset)):
        text = program.source_of(dataset).text
        return not any(word in text for word in ("by_node", "shard", "skip", "world_size"))

    classes = _classes(program, dataset)
    streams = stream_classes(program, dataset)
    for owner in classes:
        if owner not in streams or not _reads_file(program, owner):
            return False
        if _divides(program.source_of(owner).code(owner).lower()):
            return False

    return bool(classes)


def _is_streamed(program: Program, part: ast.expr) -> bool:
    """Whether it is read while it is downloaded: `load_dataset(name, streaming=True)`."""
    if not isinstance(part, ast.Call) or program.name_of(part.func) != "datasets.load_dataset":
        return False

    return program.values(argument(part, None, "streaming")) == {ConstantValue(True)}


def _reads_file(program: Program, owner: ast.ClassDef) -> bool:
    """Whether one of its methods reads a file, so that every rank gets all of it.

    def __iter__(self):
        for line in open(self.path):
            yield parse(line)
    """
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef) or method.name == "__init__":
            continue

        names = map(called_name, nodes_in(method, ast.Call))
        if any(name in ("open", "load", "memmap") for name in names):
            return True

    return False


def _divides(text: str) -> bool:
    """Whether the code of a dataset divides its samples between ranks, or draws them.

    One that divides them between the workers of a loader, and names no ranks, does neither with
    the same seed everywhere.
    """
    text = _DOCSTRING.sub("", text)

    is_drawn = "random" in text or "shuffle" in text
    if is_drawn and _SAME_SEED.search(text) is None:
        return True

    words = _OF_RANKS if "get_worker_info" in text else _DIVIDING
    return any(word in text for word in words)


# Where the loader is made, and iterated over.


def _is_for_all(program: Program, loader: ast.Call, loops: list[Loop]) -> bool:
    """Whether it is made on every rank of a distributed run, and iterated over on every one.

    A loop may still divide what it gets, `scatter(batch)`: then the loader is right.
    """
    for node in (loader, *loops):
        if framework(program, program.source_of(node)):
            return False
        if is_single_process(program, node) or may_be_guarded(program, node):
            return False

    for nearby in calls_beside(loader):
        if _divides_instead(program, loader, nearby) or _replaces(program, loader, nearby):
            return False

    calls = [call for loop in loops for call in calls_made_in(program, loop)]
    names = " ".join(called_name(call).lower() for call in calls)
    return not any(word in names for word in ("slice", "shard", "scatter"))


def _divides_instead(program: Program, loader: ast.Call, nearby: ast.Call) -> bool:
    """Whether a setting chooses between this loader and a sampler, or a loader, that divides.

    if distributed:
        loader = DataLoader(data, sampler=DistributedSampler(data))
    else:
        loader = DataLoader(data, shuffle=True)
    """
    name = program.name_of(nearby.func)
    is_divided = name == DISTRIBUTED_SAMPLER
    if name == LOADER:
        is_divided = bool(program.made(given(nearby, "sampler"), DISTRIBUTED_SAMPLER))

    return is_divided and are_exclusive(program, loader, nearby)


def _replaces(program: Program, loader: ast.Call, nearby: ast.Call) -> bool:
    """Whether a loader that divides the data is assigned to the same name later.

    loader = DataLoader(data, shuffle=True)
    if distributed:
        loader = DataLoader(data, sampler=DistributedSampler(data))
    """
    if program.name_of(nearby.func) != LOADER or not is_after(nearby, loader):
        return False

    is_same_name = not _assigned_names(loader).isdisjoint(_assigned_names(nearby))
    return is_same_name and is_divided_loader(program, nearby)


def _assigned_names(call: ast.Call) -> set[str]:
    """The names that get the loader: `self.loader` of `self.loader = DataLoader(data)`."""
    statement = parent_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {dotted(target) for target in targets} - {""}
