"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import class_around, function_around
from drumline_lint.program.value import Known
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.guards import is_on_main_only
from drumline_lint.training.on_host import is_saved_from_host
from drumline_lint.training.saves import is_in_memory, is_own

RULE = Rule(
    id="DL019",
    name="load-without-map-location",
    severity=Severity.WARNING,
    summary="torch.load without map_location on every rank",
    why=(
        "By default tensors go back to the device that they were saved from, which is mostly cuda:0, that of rank 0. "
        "Every process of a node then opens a context on that GPU and holds a copy there, and it may run out of memory."
    ),
    fix='load with `map_location="cpu"`, or onto the device of this rank',
    bad="""\
import torch
import torch.distributed as dist

dist.barrier()
state = torch.load("last.pt", weights_only=True)
""",
    good="""\
import torch
import torch.distributed as dist

dist.barrier()
state = torch.load("last.pt", map_location="cpu", weights_only=True)
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        if _is_told_where(program, call) or _is_of_sample(program, call) or is_on_main_only(program, call):
            continue
        path = argument(call, 0, "f")
        is_of_one = is_in_memory(program, path) or is_own(program, path)
        if not is_of_one and not is_saved_from_host(program, path):
            what = "a file" if path is None else source.code(path)
            said = f"every rank loads {what} onto the GPU that it was saved from"
            yield RULE.at(source, call, said)


def _is_told_where(program: Program, call: ast.Call) -> bool:
    given = argument(call, 1, "map_location")
    if given is not None:
        return program.values(given) != {Known(None)}
    mapped = argument(call, None, "mmap")
    return has_unknown_arguments(call) or (mapped is not None and program.values(mapped) != {Known(False)})


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """A dataset's files hold samples, which nobody saves from a GPU."""
    function = function_around(call)
    owner = None if function is None else class_around(function)
    if owner is None:
        return function is not None and function.name == "__getitem__"
    bases = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return any("Dataset" in name for name in (owner.name, *bases))
