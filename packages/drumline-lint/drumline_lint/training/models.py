"""Models: where they are wrapped, and what is given as a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import called_name, is_after, owner_of, scope_of, statement_of
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

WRAPPERS = (DDP, *FSDP)
_CHOOSING = ("torch.cuda.set_device", "torch.cuda.device", "torch.device")


def wrapped(call: ast.Call) -> ast.expr | None:
    """The model that a call of DDP is given."""
    return argument(call, 0, "module")


def wraps_any(program: Program) -> bool:
    """Whether a model is wrapped at all."""
    return next(program.all_calls(*WRAPPERS), None) is not None


def devices_given(program: Program, source: Source) -> Iterator[ast.expr]:
    """What is given in a file where a device is asked for: in `set_device`, `.to`, `device=`,
    `device_ids`."""
    index = program.index(source)
    for call in program.calls(source, *_CHOOSING):
        yield from call.args
    for name in ("to", "cuda"):
        yield from (call.args[0] for call in index.calls.get(name, ()) if call.args)
    for keyword in index.every(ast.keyword):
        if keyword.arg in ("device", "map_location"):
            yield keyword.value
    for call in program.calls(source, DDP):
        for listed in written_values(program, argument(call, 1, "device_ids")):
            yield from getattr(listed, "elts", ())


def is_wrapped_by(program: Program, model: ast.expr, wrapping: ast.Call) -> bool:
    """Whether that call wrapped this name before, and gave the result to another."""
    inner = wrapped(wrapping)
    statement = statement_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return (
        isinstance(inner, ast.Name)
        and isinstance(model, ast.Name)
        and scope_of(inner) is scope_of(model)
        and inner.id == model.id
        and is_after(model, wrapping)
        and program.bindings(inner) == program.bindings(model)
        and all(isinstance(target, ast.Name) and target.id != model.id for target in targets)
    )


def is_on_default_gpu(program: Program, part: ast.expr) -> bool:
    """`.cuda()`, `.to("cuda")` and `.to(torch.device("cuda"))`."""
    if not isinstance(part, ast.Call) or owner_of(part) is None:
        return False
    if called_name(part) == "cuda":
        return not part.args and not part.keywords
    if called_name(part) != "to" or not part.args:
        return False
    device = part.args[0]
    makers = [maker.call for maker in program.made(device, "torch.device")]
    names = [device, *(maker.args[0] for maker in makers if len(maker.args) == 1)]
    choices = [choice for name in names for choice in written_values(program, name)]
    return any(ConstantValue("cuda") in program.values(choice) for choice in choices)


def has_devices(program: Program, trainer: ast.Call) -> bool:
    """Whether a Trainer is told to use several devices."""
    options = [argument(trainer, None, name) for name in ("strategy", "devices")]
    values = [value for option in options for value in program.values(option)]
    constants = [value.value for value in values if isinstance(value, ConstantValue)]
    return any(
        value.startswith(("ddp", "fsdp", "deepspeed"))
        if isinstance(value, str)
        else value not in (0, 1, None)
        for value in constants
    )
