"""DL090: data that is divided by hand, so that samples are repeated or ranks have other numbers of
batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework, has_several_nodes, is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import constants, is_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    called_name,
    dotted,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, is_stripe, stream_classes, training_loops

RULE = rule("DL090")

# Code that makes parts equally long, or asks how long the shortest is.
_EVENS = re.compile(r"%|//|\bmin\(|ceil|pad|cycle|repeat|trunc|all_reduce|all_gather")
# What texts are called that get a number: the order of numbers in a set is the same everywhere.
_OF_TEXTS = re.compile(r"name|word|char|^ch$|token|text|tag|intent|letter|species|phoneme")
_BOUNDED = ("zip", "islice", "cycle", "range", "repeat")
_NUMBERED = ("i", "idx", "index", "id", "number", "step")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders of a loop with `.backward()` whose data takes every n-th sample, and samplers.

    For example:

        class Stream(IterableDataset):
            def __iter__(self):
                for sample in self.samples[rank::world_size]:
                    yield sample
    """
    if framework(program, source):
        return

    yield from _by_node(program, source)
    yield from _by_hash(program, source)
    yield from _by_order_of_set(program, source)

    calls = list(program.calls(source, LOADER))
    trained = training_loops(program) if calls else {}
    for call in calls:
        streams = stream_classes(program, given(call, "dataset"))
        stripe = _stripe(program, call, streams) if call in trained else None
        if stripe is None:
            continue

        severity = None if is_of_ranks(program, source) else Severity.NOTE
        if message := _repeated(program, call, streams):
            fix = "divide the part by torch.utils.data.get_worker_info() as well"
            yield RULE.at(source, call, message, fix=fix, severity=severity)

        is_until_end = all(_ends_with_data(program, loop) for loop in trained[call])
        if is_until_end and _is_uneven(program, call, stripe, streams):
            message = (
                "the ranks get parts of different length, by "
                f"{program.source_of(stripe).code(stripe)}: one with fewer "
                "batches ends its epoch, and the others block in the backward pass"
            )
            yield RULE.at(source, call, message, severity=severity)


# Parts of the data


def _stripe(program: Program, loader: ast.Call, streams: list[ast.ClassDef]) -> ast.expr | None:
    """Where every n-th item is taken for this rank: `samples[rank::world_size]`."""
    kinds = (ast.Subscript, ast.Call, ast.Compare)
    nodes: list[ast.expr] = []
    for owner in streams:
        nodes += nodes_in(owner, *kinds, into_functions=True)
    nodes += parts(program, given(loader, "dataset"))

    return next((node for node in nodes if is_stripe(program, node)), None)


def _repeated(program: Program, loader: ast.Call, streams: list[ast.ClassDef]) -> str:
    """What is wrong with a stream that is not divided between the workers of a loader.

    Each of them has a copy; empty if nothing is wrong.

        loader = DataLoader(Stream(), num_workers=4)
    """
    option = given(loader, "num_workers")
    counts = constants(program, option) if option is not None else set()
    count = max((number for number in counts if isinstance(number, int)), default=0)
    if count < 2 or not streams or given(loader, "worker_init_fn") is not None:
        return ""

    if any(_knows_worker(program, owner) for owner in streams):
        return ""
    return f"each of the {count} workers reads all of the rank's part: every sample comes {count} times"


def _knows_worker(program: Program, stream: ast.ClassDef) -> bool:
    """Whether a stream, or a function that one of its methods calls, asks which worker it is.

    For example:

        def __iter__(self):
            number, count = reader_number()  # of get_worker_info()
            yield from self.files[number::count]
    """
    places: list[ast.AST] = [stream]
    for method in nodes_in(stream, ast.FunctionDef, into_functions=True):
        functions = map(program.function_of, calls_made_in(program, method))
        places += [function for function in functions if function is not None]

    return any("worker" in program.source_of(place).code(place) for place in places)


def _is_uneven(
    program: Program, loader: ast.Call, stripe: ast.expr, streams: list[ast.ClassDef]
) -> bool:
    """Whether nothing makes the parts of the ranks equally long.

    What does so:

        samples = samples[: len(samples) // world_size * world_size]
    """
    if given(loader, "sampler") is not None:
        return False  # what it may be given beside, in other calls

    is_dropped = program.values(given(loader, "drop_last")) == {ConstantValue(True)}
    if is_dropped and not streams:
        return False

    source = program.source_of(stripe)
    function = enclosing_function(stripe)
    codes = [source.text if function is None else source.code(function)]
    codes += [program.source_of(owner).code(owner) for owner in streams]

    return not any("while True" in code or _EVENS.search(code) for code in codes)


def _ends_with_data(program: Program, loop: Loop) -> bool:
    """Whether each rank goes on until its own data ends.

    Not here:

        for _, batch in zip(range(1000), loader):
            ...
    """
    if not isinstance(loop, ast.For) or is_within(loop, "join") or is_within(loop, "Join"):
        return False

    names = [called_name(call) for call in nodes_in(loop.iter, ast.Call)]
    return not nodes_in(loop, ast.Break) and not any(name in _BOUNDED for name in names)


def _by_hash(program: Program, source: Source) -> Iterator[Finding]:
    """Samples that are chosen by the hash of a text: each process draws its own salt.

    For example:

        if hash(name) % world_size == rank:
            yield name
    """
    if any_text_near(program, source, "PYTHONHASHSEED", "__hash__"):
        return

    for call in program.index(source).calls.get("hash", ()):
        if isinstance(call.func, ast.Name) and _chooses_rank(program, call):
            message = (
                "hash() of a text is another number in every process: samples are read by "
                "several ranks or by none"
            )
            fix = "use a hash that is the same everywhere, as zlib.crc32(text.encode())"
            yield RULE.at(source, call, message, fix=fix)


def _chooses_rank(program: Program, call: ast.Call) -> bool:
    """Whether the remainder of the hash of a text is compared with the rank."""
    hashed = call.args[0] if call.args else call
    remainder = parent_of(call)
    if not isinstance(remainder, ast.BinOp) or not isinstance(remainder.op, ast.Mod):
        return False

    comparison = parent_of(remainder)
    if not isinstance(comparison, ast.Compare) or last_name(hashed) in _NUMBERED:
        return False

    sides = (comparison.left, *comparison.comparators)
    return any(is_rank(program, side) for side in sides)


def _by_order_of_set(program: Program, source: Source) -> Iterator[Finding]:
    """Numbers that texts get in the order of a set, which follows their hashes.

    For example:

        names = {row["label"] for row in rows}
        numbers = {name: number for number, name in enumerate(names)}
    """
    if any_text_near(program, source, "PYTHONHASHSEED", "broadcast"):
        return

    for mapping in program.index(source).every(ast.DictComp):
        numbering = mapping.generators[0].iter
        if not isinstance(numbering, ast.Call) or called_name(numbering) != "enumerate":
            continue

        items = written_values(program, numbering.args[0]) if numbering.args else []
        is_numbered = isinstance(mapping.key, ast.Name) and isinstance(mapping.value, ast.Name)
        if not is_numbered or not items or not all(map(_is_set, items)):
            continue

        if is_on_every_rank(program, mapping):
            message = (
                f"{source.code(numbering)} numbers a set: texts have another order in every process, "
                "so the same label has another number on each rank"
            )
            is_sure = _OF_TEXTS.search(last_name(mapping.key).lower()) is not None
            severity = None if is_sure and is_of_ranks(program, source) else Severity.NOTE
            fix = "number sorted(...) of it"
            yield RULE.at(source, numbering, message, fix=fix, severity=severity)


def _is_set(items: ast.expr) -> bool:
    """`{row["label"] for row in rows}`, `set(labels)` and `list(set(labels))`."""
    if isinstance(items, ast.Call) and called_name(items) in ("list", "tuple") and items.args:
        items = items.args[0]

    is_call = isinstance(items, ast.Call) and dotted(items.func) == "set"
    return is_call or isinstance(items, ast.SetComp)


# Samplers


def _by_node(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers with the rank of one node, in programs of several, with one rank for all, and with
    the rank in the place of the number of ranks.

    For example:

        DistributedSampler(data, num_replicas=world_size, rank=local_rank)
        DistributedSampler(data, num_replicas=world_size, rank=0)
        DistributedSampler(data, rank)
    """
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        number = argument(call, 1, "num_replicas")
        rank = argument(call, 2, "rank")

        is_swapped = is_rank(program, number) and (rank is None or not is_rank(program, rank))
        if number is not None and is_swapped:
            message = (
                f"num_replicas={source.code(number)}: the rank is given for the number of ranks"
            )
            yield RULE.at(source, call, message, fix="name them: num_replicas=..., rank=...")

        is_alone = program.values(number) == {ConstantValue(1)}
        if isinstance(rank, ast.Constant) and number is not None and not is_alone:
            message = f"rank={source.code(rank)} on every rank: all of them train on the same part of the data"
            yield RULE.at(source, call, message, fix="leave num_replicas and rank out")

        kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
        if kinds == {"local"} and has_several_nodes(program, source):
            message = "the sampler divides the data between the ranks of one node: all nodes have the same"
            fix = "leave num_replicas and rank out"
            yield RULE.at(source, call, message, fix=fix)
