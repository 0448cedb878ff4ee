"""DL013: DDP looks for unused parameters at every step."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Rule, Severity
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.value import Known
from drumline_lint.reading.source import Source

RULE = Rule(
    id="DL013",
    name="find-unused-parameters",
    severity=Severity.NOTE,
    summary="DDP is asked to look for unused parameters at every step",
    why=(
        "DDP walks the whole graph after every forward to find parameters that will get no gradient, also where there "
        "are none. It is right for a model of which some steps leave a part out: experts, dropped layers, losses that "
        "are switched on later. For all others it costs time at every step, and hides a layer that was forgotten."
    ),
    fix="leave it out if every parameter is used at every step; if always the same ones are unused, freeze them",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2).cuda(), find_unused_parameters=True)
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2).cuda())
""",
)
POSITION = 8


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where it is known to be true; what is a setting may be as meant."""
    for call in program.calls(source, DDP):
        given = argument(call, POSITION, "find_unused_parameters")
        if given is not None and program.values(given) == {Known(True)}:
            yield RULE.at(
                source,
                call,
                f"{source.code(call.func)} searches the graph for unused parameters at every step",
            )
