"""DL043: every rank splits the data in its own way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.run_order import Run, found_in_runs, process_of
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source
from drumline_lint.training.seeds import seeds_torch

RULE = rule("DL043")
_SPLIT = ("torch.utils.data.random_split", "torch.utils.data.dataset.random_split")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls of random_split without a generator, in runs that set no seed before, or one with the rank in it."""
    if framework(program, source) or "random_split" not in source.text:
        return
    for call in found_in_runs(program, source, _unseeded):
        if is_on_every_rank(program, call):
            message = (
                f"{source.code(call)} draws another split on every rank: "
                "what one rank tests on, another trains on"
            )
            yield RULE.at(source, call, message)


def _unseeded(program: Program, run: Run) -> Iterator[tuple[ast.AST, None]]:
    """A process that mp.spawn starts does not have the seed of its parent."""
    for number, step in enumerate(run):
        call = step.call
        if program.name_of(call.func) in _SPLIT and argument(call, 2, "generator") is None:
            earlier = [
                earlier_step
                for earlier_step in run[:number]
                if process_of(program, earlier_step) == process_of(program, step)
            ]
            seeds = [
                earlier_step.call
                for earlier_step in earlier
                if seeds_torch(program, earlier_step.call)
            ]
            is_same = bool(seeds) and not _has_rank(program, seeds[-1])
            if not has_unknown_arguments(call) and not is_same:
                yield call, None


def _has_rank(program: Program, seed: ast.Call) -> bool:
    """`torch.manual_seed(seed + rank)`"""
    first = seed.args[0] if seed.args else None
    return any(
        isinstance(value, Rank) for part in parts(program, first) for value in program.values(part)
    )
