"""DL003: every rank trains on the same samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_some_only
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.flow.single_process import is_single_process
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import LOADER
from drumline_lint.program.origins import depends_on_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, last_name, nodes_in
from drumline_lint.program.value import CallResult, ConstantValue, Instance, Items
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, training_loops

RULE = rule("DL003")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders that feed a loop with `.backward()`, on all ranks."""
    calls = list(program.calls(source, LOADER))
    trained = training_loops(program) if calls else {}
    for call in calls:
        if (
            call in trained
            and _gives_all(program, call)
            and _is_for_all(program, call, trained[call])
        ):
            dataset = given(call, "dataset")
            name = "the dataset" if dataset is None else source.code(dataset)
            message = f"every rank trains on all of {name}: no sampler splits it"
            fix = "" if given(call, "sampler") is None else "make the sampler a DistributedSampler"
            severity = Severity.WARNING if _draws_apart(program, call) else None
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _draws_apart(program: Program, call: ast.Call) -> bool:
    """Each rank has an order of its own where nothing is seeded: then it is a larger batch at
    random."""
    return _is_shuffled(program, call) and not any_text_near(
        program, program.source_of(call), "seed"
    )


def _is_shuffled(program: Program, call: ast.Call) -> bool:
    origins = written_values(program, given(call, "shuffle"))
    return any(_is_true(origin) for origin in origins)


def _gives_all(program: Program, call: ast.Call) -> bool:
    """Whether nothing in the call, nor in the dataset, has to do with ranks."""
    if has_unknown_arguments(call) or not all(_is_none(program, call, name) for name in _ORDERS):
        return False
    dataset = given(call, "dataset")
    sampler = given(call, "sampler")
    # shuffle=True is refused for a dataset that can only be iterated over
    is_shuffled = _is_shuffled(program, call)
    is_known = is_indexed(program, dataset) or _is_stream(program, dataset)
    is_ordered = any(isinstance(origin, ast.Call) for origin in written_values(program, sampler))
    if not is_shuffled and not is_known and not is_ordered:
        return False
    sources = [dataset, given(call, "worker_init_fn"), given(call, "collate_fn")]
    return not any(depends_on_rank(program, part) for part in sources)


_ORDERS = ("sampler", "batch_sampler")
_PLAIN = tuple(
    f"torch.utils.data.{name}Sampler"
    for name in ("Random", "Sequential", "SubsetRandom", "WeightedRandom")
)


def _is_none(program: Program, call: ast.Call, name: str) -> bool:
    expression = given(call, name)
    if expression is None:
        return True
    origins = written_values(program, expression) or [expression]
    return all(_is_of_one_process(program, origin) for origin in origins)


def _is_of_one_process(program: Program, sampler: ast.expr) -> bool:
    """None, or one of torch's samplers that know nothing of ranks."""
    if isinstance(sampler, ast.Call):
        return program.name_of(sampler.func) in _PLAIN and not depends_on_rank(program, sampler)
    return isinstance(sampler, ast.Constant) and sampler.value is None


def _is_true(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is True


def _is_for_all(program: Program, call: ast.Call, loops: list[Loop]) -> bool:
    """Whether it is made on every rank of a distributed run, and iterated over on every one."""
    files = {program.source_of(node) for node in (call, *loops)}
    if any(framework(program, file) for file in files):
        return False
    if is_single_process(program, call) or is_on_some_only(program, call):
        return False
    return any(
        not is_single_process(program, loop)
        and not is_on_some_only(program, loop)
        and not _is_cut_in_loop(program, loop)
        for loop in loops
    )


def _is_cut_in_loop(program: Program, loop: Loop) -> bool:
    """By a helper that takes this rank's part of a batch: `batch[my_slice(n)]`."""
    names = [last_name(call.func).lower() for call in calls_made_in(program, loop)]
    return any(part in name for name in names for part in ("slice", "shard", "scatter"))


_DIVIDING = ("rank", "world", "shard", "split", "random", "shuffle", "replica")
# Of these it is known that they are indexed, and know nothing of ranks.
_INDEXED = tuple(
    "datasets.load_from_disk torch.utils.data.ConcatDataset torch.utils.data.Subset "
    "torch.utils.data.TensorDataset torch.utils.data.random_split torchvision.datasets.".split()
)


def is_indexed(program: Program, dataset: ast.expr | None) -> bool:
    """Whether it is known to be a dataset that a sampler chooses from."""
    values = program.values(dataset)
    if any(isinstance(value, Instance) for value in values):
        return all(
            _has_indexes(program, value.of) for value in values if isinstance(value, Instance)
        )
    if any(isinstance(value, Items) for value in values):
        return True
    names = [value.name for value in values if isinstance(value, CallResult)]
    names += [
        program.name_of(origin.func)
        for origin in written_values(program, dataset)
        if isinstance(origin, ast.Call)
    ]
    return bool(names) and all(name.startswith(_INDEXED) for name in names)


def _is_stream(program: Program, dataset: ast.expr | None) -> bool:
    """Whether it is an IterableDataset of the given files that reads a file, and neither divides
    nor draws."""
    if any(_streams(program, part) for part in parts(program, dataset)):
        words = ("split_dataset_by_node", "shard", "skip", "world_size")
        return dataset is not None and not any(
            word in program.source_of(dataset).text for word in words
        )
    classes = [value.of for value in program.values(dataset) if isinstance(value, Instance)]
    return bool(classes) and all(
        _reads_file(program, owner)
        and any(str(place).endswith("IterableDataset") for place in program.ancestry(owner))
        and not any(word in program.source_of(owner).code(owner).lower() for word in _DIVIDING)
        for owner in classes
    )


def _streams(program: Program, part: ast.expr) -> bool:
    """`load_dataset(name, streaming=True)`"""
    return (
        isinstance(part, ast.Call)
        and program.name_of(part.func) == "datasets.load_dataset"
        and program.values(argument(part, None, "streaming")) == {ConstantValue(True)}
    )


def _reads_file(program: Program, owner: ast.ClassDef) -> bool:
    function = program.method(owner, "__iter__")
    calls = [] if function is None else nodes_in(function, ast.Call)
    return any(last_name(call.func) in ("open", "load", "memmap") for call in calls)


def _has_indexes(program: Program, node: ast.ClassDef) -> bool:
    ancestry = program.ancestry(node)
    if any(
        isinstance(place, str) and place.rpartition(".")[2] == "IterableDataset"
        for place in ancestry
    ):
        return False
    if program.method(node, "__getitem__") is not None:
        return True
    return any(isinstance(place, str) and place.startswith(_INDEXED) for place in ancestry)
