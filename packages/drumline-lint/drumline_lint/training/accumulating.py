"""Training loops whose optimizer makes a step only after several backward passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, end_position, position
from drumline_lint.running.guards import is_now_and_then
from drumline_lint.running.loops import calls_in, loop_around
from drumline_lint.training.steps import (
    every_nth,
    is_method,
    optimizer_steps,
    rounds,
    training_loops,
)


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A loop over micro-batches."""

    loop: Loop
    roots: dict[ast.AST, bool]
    """It and the functions that it runs, with whether it does so only at every nth round."""
    step: ast.Call
    """Of the optimizer: at every nth round, or after the loop."""


def accumulations(program: Program) -> list[Accumulation]:
    """All of the program."""
    return program.remember("accumulations", lambda: list(_find(program)))


def _find(program: Program) -> Iterator[Accumulation]:
    for loop in training_loops(program):
        roots = rounds(program, loop, every_nth)
        steps = [
            (call, rare or every_nth(program, call, root))
            for root, rare in roots.items()
            for call in optimizer_steps(program, root)
        ]
        step = None
        if not steps:
            step = _step_after(program, loop)
        elif all(rare for _, rare in steps):
            step = steps[0][0]
        found = None if step is None else Accumulation(loop, roots, step)
        if found is not None and next(every_round(program, found, "zero_grad"), None) is None:
            yield found


def _step_after(program: Program, loop: Loop) -> ast.Call | None:
    """The step that the loop around makes when this one is through; a loop over epochs has none."""
    outer = loop_around(loop)
    if outer is None:
        return None
    for root, rare in rounds(program, outer).items():
        for call in optimizer_steps(program, root):
            is_other = root is outer and (
                loop_around(call) is not outer or position(call) < end_position(loop)
            )
            if not rare and not is_other and not is_now_and_then(program, call, root):
                return call
    return None


def every_round(program: Program, found: Accumulation, *methods: str) -> Iterator[ast.Call]:
    """Calls of these methods that every micro-batch makes."""
    for root, rare in found.roots.items():
        for call in calls_in(root):
            if is_method(call, *methods) and not rare and not every_nth(program, call, root):
                yield call
