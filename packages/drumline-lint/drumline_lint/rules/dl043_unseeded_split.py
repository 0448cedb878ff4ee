"""DL043: every rank splits the data in its own way.

Without a seed, each rank draws a split of its own: samples that one rank tests on are those that
another trains on.
"""

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
_SHUFFLES = ("random.shuffle", "numpy.random.shuffle")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Random splits in programs that set no seed, or only such with the rank in it.

    train_data, test_data = random_split(data, [50000, 10000])

    The same holds for a shuffle before each rank takes its part:

    random.shuffle(files)
    files = files[rank::world_size]
    """
    if framework(program, source):
        return

    severity = None if is_of_ranks(program, source) else Severity.NOTE
    for call in program.calls(source, *_SPLITS):
        if not _is_unseeded_split(program, call) or is_seeded_alike(program, source):
            continue

        if is_on_every_rank(program, call):
            message = (
                f"{source.code(call)} draws another split on every rank: "
                "what one rank tests on, another trains on"
            )
            yield RULE.at(source, call, message, severity=severity)

    for call in program.calls(source, *_SHUFFLES):
        shuffled = dotted(call.args[0]) if call.args else ""
        if shuffled not in _names_in_stripes(program, call) or is_seeded_alike(program, source):
            continue

        message = (
            f"{source.code(call)} draws another order on every rank: "
            "the parts that the ranks take overlap, and some samples are never read"
        )
        fix = f"shuffle with a generator of one seed: random.Random(seed).shuffle({shuffled})"
        yield RULE.at(source, call, message, fix=fix, severity=severity)


def _is_unseeded_split(program: Program, call: ast.Call) -> bool:
    """Whether it splits data, and is given no generator.

    Examples: `random_split(data, [50000, 10000])`, `train_test_split(rows, test_size=0.1)`.
    """
    name = program.name_of(call.func)
    number = 2 if name.startswith("torch.") else None
    if argument(call, number, _SPLITS[name]) is not None or has_unknown_arguments(call):
        return False

    return not name.endswith("permutation") or _chooses_samples(program, call)


def _chooses_samples(program: Program, call: ast.Call) -> bool:
    """Whether a permutation is given to a Subset.

    order = np.random.permutation(len(data))
    train_data = Subset(data, order[:50000])
    """
    calls = program.index(program.source_of(call)).calls
    subsets = [*calls.get("Subset", ()), *calls.get("SubsetRandomSampler", ())]
    return any(call in parts(program, value) for subset in subsets for value in subset.args)


def _names_in_stripes(program: Program, shuffle: ast.Call) -> set[str]:
    """The names in what each rank takes after a shuffle: `files` of `files[rank::world_size]`."""
    names = set[str]()
    for part in nodes_in(scope_of(shuffle), ast.Subscript):
        if is_after(part, shuffle) and is_stripe(program, part):
            names.update(map(dotted, nodes_in(part, ast.Name)))
    return names
