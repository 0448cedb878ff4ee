"""DL001: one process for all GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Rule, Severity
from drumline_lint.program.names import DATA_PARALLEL
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = Rule(
    id="DL001",
    name="data-parallel",
    severity=Severity.WARNING,
    summary="nn.DataParallel is used",
    why=(
        "One process drives all GPUs, by threads that share one Python interpreter: at every step it copies the model "
        "to each GPU and gathers all outputs on the first. It is slower than DistributedDataParallel even on one "
        "machine, and cannot use a second one."
    ),
    fix="start one process for each GPU (torchrun) and wrap the model in DistributedDataParallel",
    bad="""\
import torch.nn as nn

model = nn.DataParallel(nn.Linear(8, 2).cuda())
""",
    good="""\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(torch.nn.Linear(8, 2).to(local_rank), device_ids=[local_rank])
""",
    only_distributed=False,
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every call of it."""
    for call in program.calls(source, DATA_PARALLEL):
        yield RULE.at(source, call, f"{source.code(call.func)} drives all GPUs from one process")
