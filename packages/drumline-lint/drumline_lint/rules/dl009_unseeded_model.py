"""DL009: the weights that training begins with are drawn without a seed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Rule, Severity
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.run_order import Run, found_in_scripts
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.models import built_at, wrapping_steps, wraps_any
from drumline_lint.training.seeds import seeded_before

RULE = Rule(
    id="DL009",
    name="unseeded-model",
    severity=Severity.NOTE,
    summary="a model is built in a run that sets no seed",
    why=(
        "Each rank draws its own weights; DistributedDataParallel then copies those of rank 0 to all. They are others "
        "in every run, so that a run cannot be repeated, and a change in the loss may be the change of the weights."
    ),
    fix="call torch.manual_seed(seed) with the same seed on every rank before the model is built",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 2))
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models that are wrapped in runs without any seed."""
    if framework(program, source) or not wraps_any(program):
        return
    for call in found_in_scripts(program, source, _unseeded):
        yield RULE.at(
            source, call, f"{source.code(call)} wraps a model whose weights are drawn without a seed"
        )


def _unseeded(program: Program, run: Run) -> Iterator[tuple[ast.AST, None]]:
    every = wrapping_steps(program, run)
    if every and not seeded_before(program, run, len(run)):
        for number in every:
            if built_at(program, run, number) is not None:
                yield run[number].call, None
