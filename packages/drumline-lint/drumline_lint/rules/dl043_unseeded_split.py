"""DL043: every rank splits the data in its own way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import dotted, is_after, nodes_in, scope_of
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import is_stripe
from drumline_lint.training.seeds import is_seeded_alike

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
        if is_given or not is_split or is_seeded_alike(program, source):
            continue
        if is_on_every_rank(program, call):
            message = (
                f"{source.code(call)} draws another split on every rank: "
                "what one rank tests on, another trains on"
            )
            severity = None if is_of_ranks(program, source) else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)
    yield from _shuffled_parts(program, source)


_SHUFFLES = ("random.shuffle", "numpy.random.shuffle")


def _shuffled_parts(program: Program, source: Source) -> Iterator[Finding]:
    """`random.shuffle(files)`, of which each rank takes `files[rank::world_size]`."""
    for call in program.calls(source, *_SHUFFLES):
        shuffled = dotted(call.args[0]) if call.args else ""
        stripes = [
            stripe
            for stripe in nodes_in(scope_of(call), ast.Subscript)
            if is_after(stripe, call) and is_stripe(program, stripe)
        ]
        named = {dotted(name) for stripe in stripes for name in nodes_in(stripe, ast.Name)}
        if shuffled in named and not is_seeded_alike(program, source):
            message = (
                f"{source.code(call)} draws another order on every rank: "
                "the parts that the ranks take overlap, and some samples are never read"
            )
            severity = None if is_of_ranks(program, source) else Severity.NOTE
            fix = f"shuffle with a generator of one seed: random.Random(seed).shuffle({shuffled})"
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _chooses_samples(program: Program, call: ast.Call) -> bool:
    """Whether a permutation is given to a Subset."""
    calls = program.index(program.source_of(call)).calls
    subsets = [*calls.get("Subset", ()), *calls.get("SubsetRandomSampler", ())]
    return any(call in parts(program, value) for subset in subsets for value in subset.args)
