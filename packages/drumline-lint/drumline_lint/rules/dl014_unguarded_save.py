"""DL014: every rank writes the same file."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.coming import how_all_come
from drumline_lint.running.guards import is_on_every_rank
from drumline_lint.training.saves import is_own, saves

RULE = Rule(
    id="DL014",
    name="unguarded-save",
    severity=Severity.ERROR,
    summary="every rank saves to the same path",
    why=(
        "All processes write the same file at the same time, each over the others. What is left may be torn, and it is "
        "found when it is to be loaded."
    ),
    fix="save under `if dist.get_rank() == 0:`, or put the rank into the path if each rank has something of its own",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
torch.save(model.module.state_dict(), "model.pt")
""",
    good="""\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(8, 2))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves that all ranks come to, with a path that is the same on all."""
    for save in saves(program, source):
        if is_on_every_rank(program, save.call) and not is_own(program, save.path):
            to = "the same file" if save.path is None else source.code(save.path)
            how = how_all_come(program, save.call)
            come = f"every rank comes to {source.code(save.call.func)}" + (f", {how}," if how else "")
            yield RULE.at(source, save.call, f"{come} and writes {to}")
