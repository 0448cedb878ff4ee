"""DL043: every rank splits the data in its own way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.run_order import Run, found_in_runs, process_of, steps_calling
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.seeds import TORCH_SEEDS, kind_of_seed, seeds_torch

RULE = rule("DL043")
# Each with the generator that it draws from, and what gives it another.
_SPLITS = {
    "torch.utils.data.random_split": ("torch", "generator"),
    "torch.utils.data.dataset.random_split": ("torch", "generator"),
    "sklearn.model_selection.train_test_split": ("numpy", "random_state"),
    "numpy.random.permutation": ("numpy", ""),
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Random splits in runs that set no seed before, or one with the rank in it."""
    splits = program.calls(source, *_SPLITS)
    if framework(program, source) or not any(_draws(program, call) for call in splits):
        return  # most programs: their runs are not followed
    for call in found_in_runs(program, source, _unseeded):
        if is_on_every_rank(program, call):
            message = (
                f"{source.code(call)} draws another split on every rank: "
                "what one rank tests on, another trains on"
            )
            yield RULE.at(source, call, message)


def _unseeded(program: Program, run: Run) -> Iterator[tuple[ast.AST, None]]:
    """A process that mp.spawn starts does not have the seed of its parent."""
    for number in steps_calling(program, run, *_SPLITS):
        step = run[number]
        if not _draws(program, step.call):
            continue
        kind, _ = _SPLITS[program.name_of(step.call.func)]
        seeds = [
            earlier.call
            for earlier in run[:number]
            if process_of(program, earlier) == process_of(program, step)
            and _seeds(program, earlier.call, kind)
        ]
        if not seeds or _has_rank(program, seeds[-1]):
            yield step.call, None


def _draws(program: Program, call: ast.Call) -> bool:
    """Whether a split draws from the generator of the process."""
    kind, option = _SPLITS[program.name_of(call.func)]
    generator = argument(call, 2 if kind == "torch" else None, option)
    return generator is None and not has_unknown_arguments(call) and _divides(program, call)


def _divides(program: Program, call: ast.Call) -> bool:
    """Whether a permutation chooses the samples of a Subset."""
    if not program.name_of(call.func).endswith("permutation"):
        return True
    subsets = [
        subset
        for name in ("Subset", "SubsetRandomSampler")
        for subset in program.index(program.source_of(call)).calls.get(name, ())
    ]
    return any(call in parts(program, indices) for subset in subsets for indices in subset.args)


def _seeds(program: Program, call: ast.Call, kind: str) -> bool:
    """Whether it seeds that generator; a helper that is not given may seed all."""
    is_helper = seeds_torch(program, call) and program.name_of(call.func) not in TORCH_SEEDS
    if is_helper or kind == "torch":
        return seeds_torch(program, call)
    return kind_of_seed(program, call) == kind


def _has_rank(program: Program, seed: ast.Call) -> bool:
    """`torch.manual_seed(seed + rank)`"""
    first = seed.args[0] if seed.args else None
    return any(
        isinstance(value, Rank) for part in parts(program, first) for value in program.values(part)
    )
