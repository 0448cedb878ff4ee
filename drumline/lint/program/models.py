"""Where the model that is wrapped was built."""

from __future__ import annotations

import ast

from drumline.lint.program.names import DDP, FSDP
from drumline.lint.program.order import Run
from drumline.lint.program.program import Program, argument
from drumline.lint.program.value import Class, Instance, Made

WRAPPERS = (DDP, *FSDP)
# Their weights are not drawn.
_LOADED = ("from_pretrained", "load")


def wrappings(program: Program, run: Run) -> list[int]:
    """The steps of a run that wrap a model."""
    return [number for number, step in enumerate(run) if program.name_of(step.call.func) in WRAPPERS]


def built_at(program: Program, run: Run, wrapping: int) -> int | None:
    """The step in which the model that is wrapped there was built with weights of its own, if that is known."""
    values = program.values(argument(run[wrapping].call, 0, "module"))
    calls = {value.call for value in values if isinstance(value, Made) and not _is_loaded(value.name)}
    classes = {value.of for value in values if isinstance(value, Instance) and program.is_module(value.of)}
    for number, step in enumerate(run[:wrapping]):
        if step.call in calls or _makes(program, step.call) & classes:
            return number
    return None


def _makes(program: Program, call: ast.Call) -> set[ast.ClassDef]:
    return {value.node for value in program.values(call.func) if isinstance(value, Class)}


def _is_loaded(name: str) -> bool:
    return name.rpartition(".")[2] in _LOADED or not name.startswith(("torch.nn.", "torchvision.", "timm."))
