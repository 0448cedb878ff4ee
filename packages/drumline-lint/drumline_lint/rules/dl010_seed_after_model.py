"""DL010: the seed comes when the weights have been drawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.program import Program
from drumline_lint.program.tree import LOOPS, above
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.alternatives import are_alternatives
from drumline_lint.running.distributed import framework
from drumline_lint.running.order import Run, Step, found_in_scripts, parting
from drumline_lint.training.models import built_at, wrapping_steps, wraps_any
from drumline_lint.training.seeds import seeded_before, seeds_torch

RULE = Rule(
    id="DL010",
    name="seed-after-model",
    severity=Severity.WARNING,
    summary="the seed is set after the model has been built",
    why=(
        "The weights were drawn when the model was built, before the seed: they are others in every run, and a run "
        "that seems to be seeded cannot be repeated."
    ),
    fix="call torch.manual_seed(seed) with the same seed on every rank before the model is built",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = torch.nn.Linear(8, 2)
torch.manual_seed(0)
model = DDP(model)
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
model = DDP(model)
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The first seed of a run, if a model that is wrapped was built before."""
    if framework(program, source) or not wraps_any(program):
        return
    for place, call in found_in_scripts(program, source, _late).items():
        model = program.source_of(call).code(call.func)
        yield RULE.at(
            source, place, f"{source.code(place)} comes after {model}(...): its weights are already drawn"
        )


def _late(program: Program, run: Run) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Where the first seed is set, or where main calls who sets it; and what built the model."""
    for number in wrapping_steps(program, run):
        built = built_at(program, run, number)
        if built is None or seeded_before(program, run, built):
            continue
        seed = next((step for step in run[built + 1 :] if seeds_torch(program, step.call)), None)
        if seed is not None and _is_meant_for_all(program, run[built], seed):
            yield parting(seed, run[built])[0], run[built].call


def _is_meant_for_all(program: Program, built: Step, seed: Step) -> bool:
    """Not what is done again and again, for each epoch, nor in another branch, nor by the model itself."""
    if built.call in seed.through:
        return False
    in_loop = any(isinstance(outer, LOOPS) for node in (seed.call, *seed.through) for outer in above(node))
    return not in_loop and not are_alternatives(program, built, seed)
