"""DL014: every rank writes the same file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.finding import Finding, Severity
from drumline.lint.program.guards import is_on_some_only
from drumline.lint.program.program import Program, argument
from drumline.lint.program.tree import inside
from drumline.lint.program.value import Rank
from drumline.lint.reading.source import Source
from drumline.lint.rule import Rule

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
SAVES = ("torch.save", "safetensors.torch.save_file", "numpy.save", "numpy.savez", "pickle.dump")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves that all ranks come to, with a path that is the same on all."""
    for call in program.calls(source, *SAVES):
        path = argument(call, 0 if "numpy" in program.name_of(call.func) else 1, "f")
        if not is_on_some_only(program, call) and not _is_own(program, path):
            yield RULE.at(
                source, call, f"every rank comes to {source.code(call.func)} and writes {_said(source, path)}"
            )


def _is_own(program: Program, path: ast.expr | None, depth: int = 0) -> bool:
    """Whether the rank is in the path, as written or as assigned before."""
    for part in inside(path, ast.Name, ast.Attribute, ast.Call) if path is not None else ():
        if any(isinstance(value, Rank) for value in program.values(part)):
            return True
        if isinstance(part, ast.Name) and depth < 4:
            for value in program.assigned(part):
                if _is_own(program, value, depth + 1):
                    return True
    return False


def _said(source: Source, path: ast.expr | None) -> str:
    return "the same file" if path is None else source.code(path)
