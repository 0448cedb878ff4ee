"""DL030: the learning rate moves on where the weights do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.distributed import framework
from drumline_lint.running.guards import is_now_and_then
from drumline_lint.training.accumulating import accumulations
from drumline_lint.training.steps import every_nth, scheduler_steps

RULE = Rule(
    id="DL030",
    name="schedule-per-micro-batch",
    severity=Severity.WARNING,
    summary="the scheduler makes a step at every micro-batch, the optimizer only at every nth",
    why=(
        "The schedule runs n times as fast as it was planned: warm-up is over, and the learning rate near its end, "
        "after an nth of the steps. Nothing fails, the model only learns less."
    ),
    fix="call the scheduler's step() next to the optimizer's",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
for i, x in enumerate(loader):
    model(x).sum().backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
""",
    good="""\
import contextlib
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
for i, x in enumerate(loader):
    is_last = (i + 1) % 4 == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        model(x).sum().backward()
    if is_last:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The scheduler's step of every micro-batch."""
    for call, step in program.remember(RULE.id, lambda: list(_too_often(program))):
        if program.source_of(call) is source:
            said = program.source_of(step).code(step)
            message = (
                f"{source.code(call)} is called at every micro-batch, {said} only at the last of several"
            )
            yield RULE.at(source, call, message)


def _too_often(program: Program) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Each such step of a scheduler, with the optimizer's."""
    for found in accumulations(program):
        if framework(program, program.source_of(found.loop)):
            continue
        for root in [root for root, is_rare in found.roots.items() if not is_rare]:
            for call in scheduler_steps(program, root):
                if not every_nth(program, call, root) and not is_now_and_then(program, call, root):
                    yield call, found.step
