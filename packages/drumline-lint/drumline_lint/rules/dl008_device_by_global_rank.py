"""DL008: the number of a process among all is taken for that of a GPU on its host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.hosts import meets_on_one_host
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source

RULE = rule("DL008")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In `set_device`, `torch.device`, `.to`, `.cuda` and DDP's `device_ids`."""
    if meets_on_one_host(program, source):
        return
    for device in _devices(program, source):
        ranks = {value.kind for value in program.values(device) if isinstance(value, Rank)}
        if ranks == {"global"} and program.source_of(device) is source:
            said = f"{source.code(device)} is the rank among all hosts, not a GPU of this one"
            yield RULE.at(source, device, said)


def _devices(program: Program, source: Source) -> Iterator[ast.expr]:
    """The expressions that stand for the number of a GPU; of `f"cuda:{rank}"`, what is put in."""
    calls = program.index(source).calls
    given = [argument(call, 0, "device") for name in ("to", "cuda") for call in calls.get(name, ())]
    given += [argument(call, 0, "device") for call in program.calls(source, "torch.cuda.set_device")]
    for call in program.calls(source, "torch.device"):
        given += [argument(call, 0, "type"), argument(call, 1, "index")]
    for call in program.calls(source, DDP):
        given.append(argument(call, 2, "output_device"))
        for listed in written_values(program, argument(call, 1, "device_ids")):
            given += listed.elts if isinstance(listed, ast.List | ast.Tuple) else []
    for one in given:
        if isinstance(one, ast.JoinedStr):
            yield from (part.value for part in one.values if isinstance(part, ast.FormattedValue))
        elif one is not None:
            yield one
