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
    """What is given in a file where a device is asked for.

    `rank` of `torch.cuda.set_device(rank)`, `model.to(rank)`, `torch.zeros(1, device=rank)` and
    `DistributedDataParallel(model, device_ids=[rank])`.
    """
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
    """Whether that call wrapped this name before, and gave the result to another.

    ddp_model = DistributedDataParallel(model)
    loss = model(batch)  # this one
    """
    inner = wrapped(wrapping)
    if not isinstance(inner, ast.Name) or not isinstance(model, ast.Name):
        return False

    is_same_name = scope_of(inner) is scope_of(model) and inner.id == model.id
    if not is_same_name or not is_after(model, wrapping):
        return False
    if program.bindings(inner) != program.bindings(model):
        return False  # the name has another value by then

    statement = statement_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return all(isinstance(target, ast.Name) and target.id != model.id for target in targets)


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
    """Whether a Trainer is told to use several devices.

    Examples: `Trainer(devices=8)`, `Trainer(strategy="ddp")`.
    """
    for name in ("strategy", "devices"):
        for value in program.values(argument(trainer, None, name)):
            if isinstance(value, ConstantValue) and _is_several(value.value):
                return True

    return False


def _is_several(option: object) -> bool:
    """Whether a strategy or a number of devices is of several processes: `"fsdp"`, 8, -1."""
    if isinstance(option, str):
        return option.startswith(("ddp", "fsdp", "deepspeed"))

    return option not in (0, 1, None)
