"""DL020: a file is trusted to run code."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Rule, Severity
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.value import Known
from drumline_lint.reading.source import Source

RULE = Rule(
    id="DL020",
    name="unsafe-load",
    severity=Severity.WARNING,
    summary="torch.load with weights_only=False",
    why=(
        "With weights_only=False torch.load unpickles anything, and whoever wrote the file can have any code run by "
        "all ranks. Tensors, numbers, strings, lists and dicts load with weights_only=True, the default since "
        "torch 2.6."
    ),
    fix="load with `weights_only=True`, and allow other classes by torch.serialization.add_safe_globals",
    bad="""\
import torch
import torch.distributed as dist

dist.barrier()
state = torch.load("last.pt", map_location="cpu", weights_only=False)
""",
    good="""\
import torch
import torch.distributed as dist

dist.barrier()
state = torch.load("last.pt", map_location="cpu", weights_only=True)
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Where it is false whatever happens."""
    for call in program.calls(source, "torch.load"):
        given = argument(call, None, "weights_only")
        if given is not None and program.values(given) == {Known(False)}:
            path = argument(call, 0, "f")
            what = "a file" if path is None else source.code(path)
            yield RULE.at(source, given, f"{what} can run any code as it is loaded")
