"""Seeds: whether the ranks of a program draw the same random numbers."""

from __future__ import annotations

import ast

from drumline_lint.program.imports import connected
from drumline_lint.program.origins import depends_on_rank
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import called_name
from drumline_lint.reading.source import Source


def is_seeded_alike(program: Program, source: Source) -> bool:
    """Whether a call whose name says so gets a number that is the same on all ranks."""
    seeds = _seeds(program, connected(program, source))
    return any(not _depends_on_rank(program, seed) for seed in seeds)


@cached_query
def _seeds(program: Program, sources: frozenset[Source]) -> list[ast.Call]:
    return [
        call
        for source in sources
        for name, calls in program.index(source).calls.items()
        if "seed" in name.lower()
        for call in calls
        if program.function_of(call) is None and called_name(call) != "seed_worker"
    ]


def _depends_on_rank(program: Program, seed: ast.Call) -> bool:
    return any(depends_on_rank(program, part) for part in seed.args)
