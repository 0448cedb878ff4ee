"""DL090: data that is divided by hand, so that samples are repeated or ranks have other numbers of
batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework, has_several_nodes, is_of_ranks
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import constants, is_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    called_name,
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
_BOUNDED = ("zip", "islice", "cycle", "range", "repeat")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders that feed a loop with `.backward()`, and samplers."""
    if framework(program, source):
        return
    yield from _by_node(program, source)
    yield from _by_hash(program, source)
    calls = list(program.calls(source, LOADER))
    trained = training_loops(program) if calls else {}
    for call in calls:
        streams = stream_classes(program, given(call, "dataset"))
        stripe = _stripe(program, call, streams) if call in trained else None
        if stripe is not None:
            severity = None if is_of_ranks(program, source) else Severity.NOTE
            yield from _repeated(program, source, call, streams, severity)
            if all(_ends_with_data(program, loop) for loop in trained[call]):
                yield from _uneven(program, call, stripe, streams, severity)


def _stripe(program: Program, loader: ast.Call, streams: list[ast.ClassDef]) -> ast.expr | None:
    """Where every n-th item is taken for this rank."""
    in_classes: list[ast.expr] = [
        node
        for owner in streams
        for node in nodes_in(owner, ast.Subscript, ast.Call, ast.Compare, into_functions=True)
    ]
    for node in (*in_classes, *parts(program, given(loader, "dataset"))):
        if is_stripe(program, node):
            return node
    return None


def _repeated(
    program: Program,
    source: Source,
    loader: ast.Call,
    streams: list[ast.ClassDef],
    severity: Severity | None,
) -> Iterator[Finding]:
    """Streams that are not divided between the workers of a loader, each of which has a copy."""
    option = given(loader, "num_workers")
    counts = constants(program, option) if option is not None else set()
    count = max((number for number in counts if isinstance(number, int)), default=0)
    is_told = given(loader, "worker_init_fn") is not None
    texts = [program.source_of(owner).code(owner) for owner in streams]
    if count > 1 and texts and not is_told and not any("worker" in text for text in texts):
        message = (
            f"each of the {count} workers reads all of the rank's part: "
            f"every sample comes {count} times"
        )
        fix = "divide the part by torch.utils.data.get_worker_info() as well"
        yield RULE.at(source, loader, message, fix=fix, severity=severity)


def _uneven(
    program: Program,
    loader: ast.Call,
    stripe: ast.expr,
    streams: list[ast.ClassDef],
    severity: Severity | None,
) -> Iterator[Finding]:
    """Parts of which nothing makes the lengths equal."""
    source = program.source_of(stripe)
    function = enclosing_function(stripe)
    codes = [source.text if function is None else source.code(function)]
    codes += [program.source_of(owner).code(owner) for owner in streams]
    is_dropped = program.values(given(loader, "drop_last")) == {ConstantValue(True)}
    is_endless = any("while True" in code for code in codes)
    if given(loader, "sampler") is not None:
        return  # what it may be given beside, in other calls
    if is_endless or any(map(_EVENS.search, codes)) or (is_dropped and not streams):
        return
    message = (
        f"the ranks get parts of different length, by {source.code(stripe)}: one with fewer "
        "batches ends its epoch, and the others block in the backward pass"
    )
    yield RULE.at(program.source_of(loader), loader, message, severity=severity)


def _ends_with_data(program: Program, loop: Loop) -> bool:
    """Whether each rank goes on until its own data ends."""
    if not isinstance(loop, ast.For) or is_within(loop, "join") or is_within(loop, "Join"):
        return False
    names = [called_name(call) for call in nodes_in(loop.iter, ast.Call)]
    return not nodes_in(loop, ast.Break) and not any(name in _BOUNDED for name in names)


_NUMBERED = ("i", "idx", "index", "id", "number", "step")


def _by_hash(program: Program, source: Source) -> Iterator[Finding]:
    """`hash(name) % world_size == rank`: each process draws its own salt for texts."""
    if any_text_near(program, source, "PYTHONHASHSEED", "__hash__"):
        return
    for call in program.index(source).calls.get("hash", ()):
        remainder = parent_of(call)
        comparison = None if remainder is None else parent_of(remainder)
        hashed = call.args[0] if call.args else call
        if (
            isinstance(call.func, ast.Name)
            and isinstance(remainder, ast.BinOp)
            and isinstance(remainder.op, ast.Mod)
            and isinstance(comparison, ast.Compare)
            and any(is_rank(program, side) for side in (comparison.left, *comparison.comparators))
            and last_name(hashed) not in _NUMBERED
        ):
            message = (
                "hash() of a text is another number in every process: samples are read by "
                "several ranks or by none"
            )
            fix = "use a hash that is the same everywhere, as zlib.crc32(text.encode())"
            yield RULE.at(source, call, message, fix=fix)


def _by_node(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers with the rank of one node, in programs of several, with one rank for all, and with
    the rank in the place of the number of ranks."""
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        rank = argument(call, 2, "rank")
        number = argument(call, 1, "num_replicas")
        size = program.values(number)
        is_alone = size == {ConstantValue(1)}
        if is_rank(program, number) and (rank is None or not is_rank(program, rank)):
            written = source.code(number) if number is not None else ""
            message = f"num_replicas={written}: the rank is given for the number of ranks"
            yield RULE.at(source, call, message, fix="name them: num_replicas=..., rank=...")
        if isinstance(rank, ast.Constant) and number is not None and not is_alone:
            message = f"rank={source.code(rank)} on every rank: all of them train on the same part of the data"
            yield RULE.at(source, call, message, fix="leave num_replicas and rank out")
        kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
        if kinds == {"local"} and has_several_nodes(program, source):
            message = "the sampler divides the data between the ranks of one node: all nodes have the same"
            fix = "leave num_replicas and rank out"
            yield RULE.at(source, call, message, fix=fix)
