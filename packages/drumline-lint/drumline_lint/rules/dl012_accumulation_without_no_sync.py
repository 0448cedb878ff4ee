"""DL012: gradients are exchanged at every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.program import Program
from drumline_lint.program.tree import function_around, inside
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.distributed import framework
from drumline_lint.training.accumulating import Accumulation, accumulations, every_round
from drumline_lint.training.steps import wrapped_calls

RULE = Rule(
    id="DL012",
    name="accumulation-without-no-sync",
    severity=Severity.WARNING,
    summary="gradients are accumulated, and yet exchanged at every micro-batch",
    why=(
        "DDP averages the gradients over all ranks in every backward. When the optimizer makes a step only at every "
        "nth, the other n - 1 exchanges are for nothing: the result is the same, the time on the network n times as "
        "long."
    ),
    fix="run all micro-batches but the last of a step under `with model.no_sync():`",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(loader):
    model(x).sum().backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    good="""\
import contextlib
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(loader):
    is_last = (i + 1) % 4 == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        model(x).sum().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
)
SWITCHES = {
    "no_sync",
    "require_backward_grad_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The backward of every micro-batch."""
    for call, step in program.remember(RULE.id, lambda: list(_unswitched(program))):
        if program.source_of(call) is source:
            yield RULE.at(
                source,
                call,
                f"{source.code(call)} averages gradients over all ranks at every micro-batch, "
                f"{program.source_of(step).code(step)} comes only after several",
            )


def _unswitched(program: Program) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Each such backward, with the step that comes after several."""
    for found in accumulations(program):
        if framework(program, program.source_of(found.loop)) or _is_switched(program, found):
            continue
        if wrapped_calls(program, found.loop):
            for call in every_round(program, found, "backward"):
                if program.function_of(call) is None:
                    yield call, found.step


def _is_switched(program: Program, found: Accumulation) -> bool:
    """Whether something in the functions around and in it says when gradients are exchanged."""
    around = function_around(found.loop) or program.source_of(found.loop).tree
    for root in (around, *found.roots):
        for node in inside(root, ast.Attribute, ast.Name, ast.Constant):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            if isinstance(word, str) and (word in SWITCHES or "no_sync" in word):
                return True
    return False
