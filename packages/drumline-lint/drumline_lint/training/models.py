"""Models: where they are built, moved to a device and wrapped, and what is a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near, calls_near
from drumline_lint.program.names import DDP, FSDP, INIT
from drumline_lint.program.origins import components, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Binding,
    ancestors,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import CallResult, ConstantValue, Instance, Rank, Value
from drumline_lint.reading.source import Source

_WORDS = ("cuda", "device", "gpu", "rank")
_DEVICES = ("torch.device", "torch.cuda.current_device")
_TAKING_DEVICES = ("torch.cuda.set_device", "torch.cuda.device", "torch.device", "torch.load", DDP)


def moves_to_gpu(program: Program, call: ast.Call) -> bool:
    """Whether it is a `.to(device)` or `.cuda()`: not `.to(torch.float16)`, not `.to("cpu")`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda"):
        return False
    return call.func.attr == "cuda" or may_be_gpu(program, argument(call, 0, "device"))


def may_be_gpu(program: Program, expression: ast.expr | None) -> bool:
    """Whether it is a device and may be a GPU; where nothing is known of it, by its name."""
    if expression is None:
        return False
    origins = written_values(program, expression)
    return any(_is_gpu(program, origin) for origin in origins) or _is_gpu(program, expression)


def _is_gpu(program: Program, expression: ast.expr) -> bool:
    if isinstance(expression, ast.JoinedStr):
        return any(
            isinstance(part, ast.Constant) and "cuda" in str(part.value)
            for part in expression.values
        )
    answers = [_says_gpu(program, value) for value in program.values(expression)]
    if any(answer is not None for answer in answers):
        return True in answers
    return any(word in last_name(expression).lower() for word in _WORDS)


def _says_gpu(program: Program, value: Value) -> bool | None:
    if isinstance(value, ConstantValue):
        is_number = isinstance(value.value, int) and not isinstance(value.value, bool)
        return is_number or (isinstance(value.value, str) and "cuda" in value.value)
    if isinstance(value, CallResult) and value.name in _DEVICES:
        return not value.call.args or may_be_gpu(program, value.call.args[0])
    return True if isinstance(value, Rank) else None


def devices_given(program: Program, source: Source) -> Iterator[ast.expr]:
    """All that is given in a file where a device is asked for: in `set_device`, `.to`, `device=`,
    `device_ids`."""
    named = {call: program.name_of(call.func) for call in program.calls(source, *_TAKING_DEVICES)}
    for call in program.index(source).every(ast.Call):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        devices = [argument(call, None, "device"), argument(call, None, "map_location")]
        name = named.get(call, "")
        if name in _TAKING_DEVICES[:2] or method in ("to", "cuda"):
            devices.append(argument(call, 0, "device"))
        elif name == "torch.device":
            devices += [argument(call, 0, "type"), argument(call, 1, "index")]
        elif name == "torch.load":
            devices.append(argument(call, 1, "map_location"))
        elif name == DDP:
            for listed in written_values(program, argument(call, 1, "device_ids")):
                devices += listed.elts if isinstance(listed, (ast.List, ast.Tuple)) else []
            devices.append(argument(call, 2, "output_device"))
        yield from dict.fromkeys(device for device in devices if device is not None)


def is_on_cpu_only(program: Program, source: Source) -> bool:
    """Whether all process groups of a file and its program use gloo, and no code uses a GPU."""
    backends = [
        origin
        for call in calls_near(program, source, INIT)
        for origin in written_values(program, argument(call, 0, "backend"))
    ]
    is_gloo = all(
        isinstance(backend, ast.Constant) and backend.value == "gloo" for backend in backends
    )
    return bool(backends) and is_gloo and not any_text_near(program, source, "cuda")


# Libraries whose models are on the CPU until they are moved.
_ON_CPU = ("torch.nn.", "torchvision.models.", "timm.create_model")
# After these, or within them, tensors are made elsewhere to begin with.
_DEFAULTS = ("set_default_device", "set_default_tensor_type", "init_empty_weights")
_MOVING_WORDS = ("cuda", "device", "gpu", "move")
DEEPEST = 6


def wrapped(call: ast.Call) -> ast.expr | None:
    """The model that a call of DDP is given."""
    return argument(call, 0, "module")


def built_of(program: Program, model: ast.expr | None) -> Iterator[ast.AST]:
    """All that makes it and its parts; what is done when it is called is left out."""
    return components(program, model, only_making=True)


def is_made_on_cpu(program: Program, model: ast.expr) -> bool:
    """Whether all that makes it is seen, and nothing of that has to do with a device."""
    values = program.values(model)
    is_known = all(_is_seen_on_cpu(program, value) for value in values)
    if not values or not is_known or _has_default(program, model):
        return False
    return not any(_concerns_device(node) for node in built_of(program, model))


def _is_seen_on_cpu(program: Program, value: Value) -> bool:
    if isinstance(value, CallResult) and value.name.endswith(".convert_sync_batchnorm"):
        return is_made_on_cpu(program, value.call.args[0]) if value.call.args else False
    return isinstance(value, Instance) or (
        isinstance(value, CallResult) and value.name.startswith(_ON_CPU)
    )


def _has_default(program: Program, model: ast.expr) -> bool:
    return any_text_near(program, program.source_of(model), *_DEFAULTS)


def _concerns_device(node: ast.AST) -> bool:
    """`.to(...)`, `.cuda()`, `device=...`, or a name that says so."""
    if isinstance(node, ast.keyword):
        return node.arg is None or "device" in node.arg
    if isinstance(node, (ast.Attribute, ast.Name)):
        name = last_name(node)
        return name in ("to", "cuda", "to_empty") or "device" in name.lower()
    return False


def is_moved_before(program: Program, model: ast.expr, use: ast.AST, depth: int = 0) -> bool:
    """Whether it may be on a GPU when it is used: moved in its making, or between that and the
    use."""
    if depth > DEEPEST or _has_default(program, model) or _is_in_device_block(model):
        return True
    if any(_is_before(call, use) for call in moves_of(program, model)):
        return True
    if _is_moved_by_helper(program, model, use):
        return True
    if isinstance(model, ast.Name):
        behind = [
            origin for binding in program.bindings(model) for origin in _behind(program, binding)
        ]
    else:
        behind = [
            value
            for value in (model.args if isinstance(model, ast.Call) else ())
            if isinstance(value, (ast.Name, ast.Attribute))
        ]
        if any(_is_move(node) for node in built_of(program, model)):
            return True
    return any(is_moved_before(program, origin, origin, depth + 1) for origin in behind)


def _behind(program: Program, binding: Binding) -> list[ast.expr]:
    if isinstance(binding.node, ast.arg):
        return [value for value in program.arguments_for(binding.node) if value is not None]
    return [] if binding.value is None else [binding.value]


def _is_move(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("to", "cuda", "to_empty")


def moves_of(program: Program, model: ast.expr) -> list[ast.Call]:
    """All `.to(device)` and `.cuda()` on what is written the same way: of a name in the same
    function."""
    home = enclosing_function(model)
    calls = program.index(program.source_of(model)).calls
    return [
        call
        for call in (*calls.get("to", ()), *calls.get("cuda", ()))
        if isinstance(call.func, ast.Attribute)
        and _is_written_so(_chained(call.func.value), model)
        and (isinstance(model, ast.Attribute) or enclosing_function(call) is home)
        and moves_to_gpu(program, call)
    ]


def _chained(expression: ast.expr) -> ast.expr:
    """Of `model.train().half()`, the model: its methods that change it return it."""
    while isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        expression = expression.func.value
    return expression


def _is_written_so(left: ast.expr, right: ast.expr) -> bool:
    while (
        isinstance(left, ast.Attribute)
        and isinstance(right, ast.Attribute)
        and left.attr == right.attr
    ):
        left = left.value
        right = right.value
    return isinstance(left, ast.Name) and isinstance(right, ast.Name) and left.id == right.id


def _is_before(move: ast.AST, use: ast.AST) -> bool:
    return enclosing_function(move) is not enclosing_function(use) or position(move) < position(use)


def _is_moved_by_helper(program: Program, model: ast.expr, use: ast.AST) -> bool:
    """Whether it is given to something whose name, or whose arguments, have to do with devices."""
    home = enclosing_function(model) or program.source_of(model).tree
    for call in nodes_in(home, ast.Call) if isinstance(model, (ast.Name, ast.Attribute)) else ():
        is_given = position(call) < position(use) and any(
            _is_written_so(value, model) for value in call.args
        )
        is_around = any(outer is call for outer in ancestors(use))
        if (
            is_given
            and not is_around
            and any(word in ast.unparse(call).lower() for word in _MOVING_WORDS)
        ):
            return True
    return False


def _is_in_device_block(node: ast.AST) -> bool:
    """`with torch.device("cuda"):` puts all that is made in it there."""
    items = [
        item for outer in ancestors(node) if isinstance(outer, ast.With) for item in outer.items
    ]
    return any("device" in ast.unparse(item.context_expr) for item in items)


def has_devices(program: Program, call: ast.Call) -> bool:
    origins = written_values(program, argument(call, 1, "device_ids"))
    return any(
        isinstance(origin, (ast.List, ast.Tuple)) and bool(origin.elts) for origin in origins
    )


WRAPPERS = (DDP, *FSDP)


def wraps_any(program: Program) -> bool:
    """Whether a model is wrapped at all; asked before anyone goes through whole runs."""
    return next(program.all_calls(*WRAPPERS), None) is not None


def is_wrapped_model(program: Program, model: ast.expr) -> bool:
    """Whether it is DDP, or the model inside it, by the same name or by one that it had before."""
    if isinstance(model, ast.Attribute) and model.attr == "module":
        model = model.value
    return bool(program.made(model, DDP)) or (
        isinstance(model, ast.Name)
        and any(is_wrapped_by(program, model, wrapping) for wrapping in program.all_calls(DDP))
    )


def is_wrapped_by(program: Program, model: ast.Name, wrapping: ast.Call) -> bool:
    """Whether that call wrapped this name before, and gave the result to another."""
    inner = wrapped(wrapping)
    statement = statement_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return (
        isinstance(inner, ast.Name)
        and scope_of(inner) is scope_of(model)
        and inner.id == model.id
        and position(wrapping) < position(model)
        and program.bindings(inner) == program.bindings(model)
        and all(isinstance(target, ast.Name) and target.id != model.id for target in targets)
    )
