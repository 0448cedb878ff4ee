"""DL003: every rank trains on the same samples."""

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
from drumline_lint.training.loaders import (
    given,
    is_divided_loader,
    stream_classes,
    training_loops,
)

RULE = rule("DL003")
_PLAIN = tuple(
    f"torch.utils.data.{name}Sampler"
    for name in ("Random", "Sequential", "SubsetRandom", "WeightedRandom")
)
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
    """Loaders that feed a loop with `.backward()`, on all ranks."""
    calls = list(program.calls(source, LOADER))
    trained = training_loops(program) if calls else {}
    for call in calls:
        loops = trained.get(call, [])
        if loops and _gives_all(program, call) and _is_for_all(program, call, loops):
            dataset = given(call, "dataset")
            name = "the dataset" if dataset is None else source.code(dataset)
            message = f"every rank trains on all of {name}: no sampler splits it"
            # unseeded, each rank has an order of its own: then it is a larger batch at random
            is_seeded = not _is_shuffled(program, call) or any_text_near(program, source, "seed")
            severity = None if is_seeded else Severity.WARNING
            # whoever knows of samplers divides this data elsewhere, or has reasons not to
            is_known = any_text_near(program, source, "DistributedSampler")
            if is_known or not is_of_ranks(program, source):
                severity = Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _is_shuffled(program: Program, call: ast.Call) -> bool:
    return ConstantValue(True) in program.values(given(call, "shuffle"))


def _gives_all(program: Program, call: ast.Call) -> bool:
    """Whether nothing in the call, nor in the dataset, has to do with ranks."""
    samplers = [given(call, "sampler"), given(call, "batch_sampler")]
    if has_unknown_arguments(call) or not all(_is_plain(program, part) for part in samplers):
        return False
    dataset = given(call, "dataset")
    # shuffle=True is refused for a dataset that can only be iterated over
    is_ordered = any(sampler is not None for sampler in samplers) or _is_shuffled(program, call)
    if not is_ordered and not _is_indexed(program, dataset) and not _is_stream(program, dataset):
        return False
    sources = [dataset, *samplers, given(call, "worker_init_fn"), given(call, "collate_fn")]
    classes = [value.of for value in program.values(dataset) if isinstance(value, Instance)]
    texts = [program.source_of(owner).code(owner) for owner in classes]
    is_divided = any("rank" in text or "world_size" in text for text in texts)
    return not is_divided and not any(depends_on_rank(program, part) for part in sources)


def _is_plain(program: Program, sampler: ast.expr | None) -> bool:
    """None, or one of torch's samplers that know nothing of ranks."""
    return all(
        (isinstance(origin, ast.Constant) and origin.value is None)
        or (isinstance(origin, ast.Call) and _is_plain_class(program, origin.func))
        or (isinstance(origin, ast.Call) and _is_plain_batch(program, origin))
        for origin in written_values(program, sampler)
    )


def _is_plain_class(program: Program, function: ast.expr) -> bool:
    """Also of several that are chosen from."""
    names = {getattr(value, "name", "") for value in program.values(function)}
    return bool(names) and names <= set(_PLAIN)


def _is_plain_batch(program: Program, call: ast.Call) -> bool:
    """`BatchSampler(RandomSampler(data), 16)`"""
    is_batch = program.name_of(call.func) == "torch.utils.data.BatchSampler"
    sampler = argument(call, 0, "sampler") if is_batch else None
    return sampler is not None and _is_plain(program, sampler)


def _is_for_all(program: Program, call: ast.Call, loops: list[Loop]) -> bool:
    """Whether it is made on every rank of a distributed run, and iterated over on every one."""
    nodes = (call, *loops)
    if any(framework(program, program.source_of(node)) for node in nodes):
        return False
    if any(is_single_process(program, node) or may_be_guarded(program, node) for node in nodes):
        return False
    if any(_divides_instead(program, call, nearby) for nearby in calls_beside(call)):
        return False
    if any(_replaces(program, call, nearby) for nearby in calls_beside(call)):
        return False
    calls = [inner for loop in loops for inner in calls_made_in(program, loop)]
    names = " ".join(called_name(inner).lower() for inner in calls)
    return not any(word in names for word in ("slice", "shard", "scatter"))


def _divides_instead(program: Program, call: ast.Call, nearby: ast.Call) -> bool:
    """Whether a setting chooses between this loader and a sampler, or a loader, that divides the
    data."""
    if program.name_of(nearby.func) == DISTRIBUTED_SAMPLER:
        return are_exclusive(program, call, nearby)
    is_loader = program.name_of(nearby.func) == LOADER
    sampler = given(nearby, "sampler") if is_loader else None
    is_divided = bool(program.made(sampler, DISTRIBUTED_SAMPLER))
    return is_divided and are_exclusive(program, call, nearby)


def _replaces(program: Program, call: ast.Call, nearby: ast.Call) -> bool:
    """Whether a loader that divides the data is assigned to the same name later:
    `if distributed: loader = DataLoader(data, sampler=DistributedSampler(data))`."""
    if program.name_of(nearby.func) != LOADER or not is_after(nearby, call):
        return False
    is_same_name = not _assigned_names(call).isdisjoint(_assigned_names(nearby))
    return is_same_name and is_divided_loader(program, nearby)


def _assigned_names(call: ast.Call) -> set[str]:
    statement = parent_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {dotted(target) for target in targets} - {""}


def _is_indexed(program: Program, dataset: ast.expr | None) -> bool:
    """Whether it is known to be a dataset that a sampler chooses from."""
    values = program.values(dataset)
    classes = [value.of for value in values if isinstance(value, Instance)]
    names = [value.name for value in values if isinstance(value, CallResult)]
    streams = stream_classes(program, dataset)
    return (
        bool(classes or names)
        and all(
            owner not in streams and program.method(owner, "__getitem__") is not None
            for owner in classes
        )
        and all(name.startswith(_INDEXED) for name in names)
    )


def _is_stream(program: Program, dataset: ast.expr | None) -> bool:
    """Whether it is an IterableDataset that reads a file, and neither divides nor draws."""
    if any(_streams(program, part) for part in parts(program, dataset)):
        text = "" if dataset is None else program.source_of(dataset).text
        return not any(word in text for word in ("by_node", "shard", "skip", "world_size"))
    classes = [value.of for value in program.values(dataset) if isinstance(value, Instance)]
    return bool(classes) and all(
        owner in stream_classes(program, dataset)
        and _reads_file(program, owner)
        and not _divides(program.source_of(owner).code(owner).lower())
        for owner in classes
    )


def _divides(text: str) -> bool:
    """Whether the code of a dataset divides its samples between ranks, or draws them. One that
    divides them between the workers of a loader, and names no ranks, does neither with the
    same seed everywhere."""
    text = _DOCSTRING.sub("", text)
    is_drawn = "random" in text or "shuffle" in text
    if is_drawn and _SAME_SEED.search(text) is None:
        return True
    return any(word in text for word in (_OF_RANKS if "get_worker_info" in text else _DIVIDING))


def _streams(program: Program, part: ast.expr) -> bool:
    """`load_dataset(name, streaming=True)`"""
    is_load = isinstance(part, ast.Call) and program.name_of(part.func) == "datasets.load_dataset"
    streaming = argument(part, None, "streaming") if isinstance(part, ast.Call) else None
    return is_load and program.values(streaming) == {ConstantValue(True)}


def _reads_file(program: Program, owner: ast.ClassDef) -> bool:
    methods = [part for part in owner.body if isinstance(part, ast.FunctionDef)]
    reading = [method for method in methods if method.name != "__init__"]
    calls = [call for method in reading for call in nodes_in(method, ast.Call)]
    return any(called_name(call) in ("open", "load", "memmap") for call in calls)
