"""DL043: every rank splits the data in its own way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import depends_on_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import called_name
from drumline_lint.reading.source import Source

RULE = rule("DL043")
# Each with what gives it a generator of its own.
_SPLITS = {
    "torch.utils.data.random_split": "generator",
    "torch.utils.data.dataset.random_split": "generator",
    "sklearn.model_selection.train_test_split": "random_state",
    "numpy.random.permutation": "",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Random splits in programs that set no seed, or only such with the rank in it."""
    if framework(program, source):
        return
    for call in program.calls(source, *_SPLITS):
        name = program.name_of(call.func)
        number = 2 if name.startswith("torch.") else None
        is_given = argument(call, number, _SPLITS[name]) is not None or has_unknown_arguments(call)
        is_split = not name.endswith("permutation") or _chooses_samples(program, call)
        if is_given or not is_split or _is_seeded(program, connected(program, source)):
            continue
        if is_on_every_rank(program, call):
            message = (
                f"{source.code(call)} draws another split on every rank: "
                "what one rank tests on, another trains on"
            )
            severity = None if is_of_ranks(program, source) else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _chooses_samples(program: Program, call: ast.Call) -> bool:
    """Whether a permutation is given to a Subset."""
    calls = program.index(program.source_of(call)).calls
    subsets = [*calls.get("Subset", ()), *calls.get("SubsetRandomSampler", ())]
    return any(call in parts(program, value) for subset in subsets for value in subset.args)


@cached_query
def _is_seeded(program: Program, sources: frozenset[Source]) -> bool:
    """Whether a call whose name says so gets a number that is the same on all ranks."""
    seeds = [
        call
        for source in sources
        for name, calls in program.index(source).calls.items()
        if "seed" in name.lower()
        for call in calls
        if program.function_of(call) is None and called_name(call) != "seed_worker"
    ]
    return any(not any(depends_on_rank(program, part) for part in seed.args) for seed in seeds)
