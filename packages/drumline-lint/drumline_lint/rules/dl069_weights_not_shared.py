"""DL069: gradients are averaged by hand, and the ranks begin with different weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import batch_loops
from drumline_lint.program.imports import calls_near, connected
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import nodes_in
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any
from drumline_lint.training.seeds import TORCH_SEEDS, seeds_torch

RULE = rule("DL069", in_tests=False)
# Whatever gives all ranks the same weights.
_SHARING = ("broadcast", "load_state_dict", "from_pretrained", "sync_param", "scatter")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A seed with the rank in it, or the exchange of gradients where no seed is set."""
    if wraps_any(program) or not calls_near(program, source, INIT):
        return
    for call in _places(program, connected(program, source)):
        if program.source_of(call) is source:
            message = (
                "every rank draws its own weights, and averaging gradients by hand "
                "does not bring them together"
            )
            yield RULE.at(source, call, message)


@cached_query
def _places(program: Program, near: frozenset[Source]) -> list[ast.Call]:
    """In all files that run together."""
    exchanges = [call for file in near for call in _gradient_sums(program, file)]
    if not exchanges or not any(batch_loops(program, file) for file in near) or _shares(near):
        return []
    seeds = [
        call
        for file in near
        for call in program.index(file).every(ast.Call)
        if seeds_torch(program, call)
    ]
    return [seed for seed in seeds if _has_rank(program, seed)] or ([] if seeds else exchanges)


def _gradient_sums(program: Program, source: Source) -> Iterator[ast.Call]:
    """`dist.all_reduce(parameter.grad)`"""
    for call in program.calls(source, "torch.distributed.all_reduce"):
        names = nodes_in(call.args[0], ast.Attribute) if call.args else []
        if any(name.attr == "grad" for name in names):
            yield call


def _shares(near: frozenset[Source]) -> bool:
    return any(word in file.text for file in near for word in _SHARING)


def _has_rank(program: Program, seed: ast.Call) -> bool:
    is_torch = program.name_of(seed.func) in TORCH_SEEDS
    first = seed.args[0] if is_torch and seed.args else None
    return any(
        isinstance(value, Rank) for part in parts(program, first) for value in program.values(part)
    )
