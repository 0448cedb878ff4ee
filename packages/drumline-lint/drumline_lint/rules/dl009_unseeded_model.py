"""DL009: the weights that training begins with are drawn without a seed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.run_order import Run, found_in_runs, steps_calling
from drumline_lint.program.program import Program
from drumline_lint.program.value import CallResult, Class, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS, wrapped, wraps_any
from drumline_lint.training.seeds import seeds_torch

RULE = rule("DL009")
# Their weights are not drawn.
_LOADED = ("from_pretrained", "load")
_DRAWN = ("torch.nn.", "torchvision.", "timm.")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models that are wrapped in runs without any seed."""
    if framework(program, source) or not wraps_any(program):
        return
    for call in found_in_runs(program, source, _unseeded):
        yield RULE.at(
            source,
            call,
            f"{source.code(call)} wraps a model whose weights are drawn without a seed",
        )


def _unseeded(program: Program, run: Run) -> Iterator[tuple[ast.AST, None]]:
    wrapping = steps_calling(program, run, *WRAPPERS)
    if not wrapping or any(seeds_torch(program, step.call) for step in run):
        return
    first_steps = _first_steps(program, run)
    for number in wrapping:
        call = run[number].call
        if any(first_steps.get(node, number) < number for node in _makers(program, call)):
            yield call, None


def _makers(program: Program, wrapping: ast.Call) -> Iterator[ast.AST]:
    """The calls and the classes that make the wrapped model and draw its weights."""
    for value in program.values(wrapped(wrapping)):
        if isinstance(value, CallResult):
            if _is_drawn(value.name):
                yield value.call
        elif isinstance(value, Instance) and program.is_module(value.of):
            yield value.of


def _is_drawn(name: str) -> bool:
    is_loaded = name.rpartition(".")[2] in _LOADED
    return name.startswith(_DRAWN) and name not in WRAPPERS and not is_loaded


def _first_steps(program: Program, run: Run) -> dict[ast.AST, int]:
    """The first step of a run that makes a call, or an instance of a class."""
    first_steps: dict[ast.AST, int] = {}
    for number, step in enumerate(run):
        first_steps.setdefault(step.call, number)
        for value in program.values(step.call.func):
            if isinstance(value, Class):
                first_steps.setdefault(value.node, number)
    return first_steps
