"""DL075: ranks train on parts of different lengths."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import batch_loops
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.origins import components, depends_on_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, last_name, nodes_in
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders
from drumline_lint.training.steps import wrapped_calls

RULE = rule("DL075", in_tests=False)
# Whoever names one of these knows that the parts may differ.
_KNOWING = (
    "// world",
    "//world",
    "islice",
    "ReduceOp.MIN",
    "drop_last=True",
    "with_length",
    "repeat(",
    "while True",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loops over a loader whose dataset is `items[rank::world_size]`, until it is exhausted."""
    if framework(program, source):
        return
    for loop in batch_loops(program, source):
        if not isinstance(loop, ast.For) or not wrapped_calls(program, loop) or _ends(loop):
            continue
        for call in _without_sampler(program, loop):
            cut = _cut(program, given(call, "dataset"))
            if cut is not None and not _is_known(program, call, cut):
                where = program.source_of(cut)
                message = (
                    f"{where.code(cut)} has more items on some ranks than on others: "
                    "those block in the backward pass of the last batch"
                )
                yield RULE.at(source, call if program.source_of(call) is source else loop, message)


def _without_sampler(program: Program, loop: ast.For) -> list[ast.Call]:
    calls = loaders(program, loop.iter)
    return [call for call in calls if given(call, "sampler") is None]


def _ends(loop: Loop) -> bool:
    """Whether it may end before, or waits for no one."""
    is_joined = is_within(loop, "join") or is_within(loop, "Join")
    return is_joined or bool(nodes_in(loop, ast.Break))


def _cut(program: Program, dataset: ast.expr | None) -> ast.expr | None:
    """`items[rank::world_size]` or `range(rank, n, world_size)` in the making of a dataset."""
    for node in components(program, dataset):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            start = node.slice.lower
            step = node.slice.step
        elif isinstance(node, ast.Call) and last_name(node.func) == "range" and node.args[2:]:
            start = node.args[0]
            step = node.args[2]
        else:
            continue
        is_rank = start is not None and any(
            isinstance(value, Rank) for value in program.values(start)
        )
        if is_rank and depends_on_rank(program, step):
            return node
    return None


def _is_known(program: Program, call: ast.Call, cut: ast.expr) -> bool:
    texts = [program.source_of(node).text for node in (call, cut)]
    return any(word in text for text in texts for word in _KNOWING)
