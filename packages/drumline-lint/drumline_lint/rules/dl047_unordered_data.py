"""DL047: the order of the data differs across ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import DISTRIBUTED_SAMPLER
from drumline_lint.program.origins import depends_on_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    called_name,
    dotted,
    enclosing_class,
    enclosing_function,
    nodes_in,
    parent_of,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import Instance
from drumline_lint.reading.source import Source

RULE = rule("DL047", only_distributed=False, in_tests=False)
_LISTINGS = ("listdir", "scandir", "glob", "iglob", "rglob", "iterdir")
_ORDERING = ("sorted", "natsorted", "sort", "set", "len")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Lists in an arbitrary order that are cut by the rank, or that a DistributedSampler divides."""
    if "rank" not in source.text and "Dataset" not in source.text:
        return
    for name in _LISTINGS:
        for call in program.index(source).calls.get(name, ()):
            scope = enclosing_function(call) or scope_of(call)
            names = {called_name(call) for call in nodes_in(scope, ast.Call)}
            is_cut = _is_cut_by_rank(program, call, scope)
            if names.isdisjoint(_ORDERING) and (is_cut or _is_sampled(program, call)):
                message = (
                    f"the order of {source.code(call)} differs across hosts, "
                    "and ranks take their samples from it by position"
                )
                yield RULE.at(source, call, message, fix="sort it")
    for call in program.index(source).calls.get("hash", ()):
        remainder = parent_of(call)
        is_remainder = isinstance(remainder, ast.BinOp) and isinstance(remainder.op, ast.Mod)
        divisor = remainder.right if isinstance(remainder, ast.BinOp) and is_remainder else None
        if depends_on_rank(program, divisor):
            message = (
                f"{source.code(call)} of text differs in every process: "
                "some samples go to several ranks, others to none"
            )
            yield RULE.at(source, call, message, fix="use zlib.crc32 of the encoded text")


def _is_cut_by_rank(program: Program, call: ast.Call, scope: ast.AST) -> bool:
    """`files[rank::world_size]`, in the same function."""
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {dotted(target) for target in targets} - {""}
    return any(
        isinstance(cut.slice, ast.Slice)
        and (dotted(cut.value) in names or cut.value is call)
        and depends_on_rank(program, cut.slice.lower)
        and cut.slice.step is not None
        for cut in nodes_in(scope, ast.Subscript)
    )


def _is_sampled(program: Program, call: ast.Call) -> bool:
    """Whether it is, or is kept by, the dataset of a DistributedSampler."""
    function = enclosing_function(call)
    is_kept = function is not None and function.name == "__init__"
    owner = None if function is None else enclosing_class(function)
    sampled = _sampled(program)
    return call in sampled or (is_kept and owner in sampled)


@cached_query
def _sampled(program: Program) -> set[ast.AST]:
    """What makes the datasets that a DistributedSampler divides."""
    datasets = [call.args[0] for call in program.all_calls(DISTRIBUTED_SAMPLER) if call.args]
    values = [value for dataset in datasets for value in program.values(dataset)]
    classes = {value.of for value in values if isinstance(value, Instance)}
    return classes | {part for dataset in datasets for part in parts(program, dataset)}
