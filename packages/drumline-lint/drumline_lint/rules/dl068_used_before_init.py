"""DL068: the process group is used before it is initialized."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.run_order import Run, Step, found_in_runs, process_of
from drumline_lint.program.names import COLLECTIVES, DDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors
from drumline_lint.reading.source import Source

RULE = rule("DL068", in_tests=False)
_USING = frozenset(
    {*COLLECTIVES, DDP, "torch.distributed.get_rank", "torch.distributed.get_world_size"}
) - {"torch.distributed.init_device_mesh"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that need a group, in a run that initializes it only later."""
    for call, init in found_in_runs(program, source, _early_uses).items():
        where = program.source_of(init)
        line = where.where(init)
        place = line if where is source else f"{where.path.name}, {line}"
        message = f"the process group is initialized only later ({place}): this call raises"
        yield RULE.at(source, call, message)


def _early_uses(program: Program, run: Run) -> Iterator[tuple[ast.AST, ast.AST]]:
    inits = [number for number, step in enumerate(run) if program.name_of(step.call.func) == INIT]
    if not inits or any(_is_choice(program, run[number]) for number in inits):
        return
    init = run[inits[0]]
    uses = [step for step in run[: inits[0]] if program.name_of(step.call.func) in _USING]
    for step in uses:
        is_same_process = process_of(program, step) == process_of(program, init)
        if is_same_process and not _is_choice(program, step):
            yield step.call, init.call


def _is_choice(program: Program, step: Step) -> bool:
    """Whether a condition decides about it, but that of a script, or a failure is caught."""
    nodes = (step.call, *step.through)
    tests = [test for node in nodes for test, _ in conditions(program, node)]
    is_tried = any(isinstance(outer, ast.Try) for node in nodes for outer in ancestors(node))
    return is_tried or any("__name__" not in ast.unparse(test) for test in tests)
