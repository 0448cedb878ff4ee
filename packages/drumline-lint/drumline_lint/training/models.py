"""Where the model that is wrapped was built."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.value import Class, Instance, Made
from drumline_lint.running.order import Run

WRAPPERS = (DDP, *FSDP)
# Their weights are not drawn.
_LOADED = ("from_pretrained", "load")


def wraps_any(program: Program) -> bool:
    """Whether a model is wrapped at all; asked before anyone goes through whole runs."""
    return next(program.all_calls(*WRAPPERS), None) is not None


def wrapping_steps(program: Program, run: Run) -> list[int]:
    """The steps of a run that wrap a model."""
    return [number for number, step in enumerate(run) if program.name_of(step.call.func) in WRAPPERS]


def built_at(program: Program, run: Run, wrapping: int) -> int | None:
    """The step in which the model that is wrapped there was built with weights of its own, if that is known."""
    values = program.values(argument(run[wrapping].call, 0, "module"))
    made: set[ast.AST] = {
        value.call
        for value in values
        if isinstance(value, Made) and not _is_loaded(value.name) and value.name not in WRAPPERS
    }
    made |= {value.of for value in values if isinstance(value, Instance) and program.is_module(value.of)}
    first = program.remember(("first made", id(run)), lambda: _first_made(program, run))
    numbers = [first[one] for one in made if first.get(one, wrapping) < wrapping]
    return min(numbers, default=None)


def _first_made(program: Program, run: Run) -> dict[ast.AST, int]:
    """Of each call and class, the first step of a run that makes it."""
    found: dict[ast.AST, int] = {}
    for number, step in enumerate(run):
        found.setdefault(step.call, number)
        for value in program.values(step.call.func):
            if isinstance(value, Class):
                found.setdefault(value.node, number)
    return found


def _is_loaded(name: str) -> bool:
    return name.rpartition(".")[2] in _LOADED or not name.startswith(("torch.nn.", "torchvision.", "timm."))
