"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.guards import is_on_main_only
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class, enclosing_function
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_in_memory, is_own

RULE = rule("DL019")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        if _is_told_where(program, call) or _is_of_sample(program, call) or is_on_main_only(program, call):
            continue
        path = argument(call, 0, "f")
        if not is_in_memory(program, path) and not is_own(program, path):
            what = "a file" if path is None else source.code(path)
            said = f"every rank loads {what} onto the GPU that it was saved from"
            yield RULE.at(source, call, said)


def _is_told_where(program: Program, call: ast.Call) -> bool:
    given = argument(call, 1, "map_location")
    if given is not None:
        return program.values(given) != {ConstantValue(None)}
    mapped = argument(call, None, "mmap")
    return has_unknown_arguments(call) or (mapped is not None and program.values(mapped) != {ConstantValue(False)})


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """A dataset's files hold samples, which nobody saves from a GPU."""
    function = enclosing_function(call)
    owner = None if function is None else enclosing_class(function)
    if owner is None:
        return function is not None and function.name == "__getitem__"
    bases = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return any("Dataset" in name for name in (owner.name, *bases))
