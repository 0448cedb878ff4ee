"""Expressions that are tensors of a training step: on the GPU, and not yet computed."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Binding, dotted, last_name, nodes_in, parent_of, scope_of
from drumline_lint.program.value import CallResult, Instance, LoopItem


def goes_backward(program: Program, expression: ast.Name | ast.Attribute) -> bool:
    """Whether `.backward()` is called on it: then a step has computed it, whatever made it."""
    written = dotted(expression)
    if not written:
        return False
    calls = program.index(program.source_of(expression)).calls.get("backward", ())
    scope = scope_of(expression)
    bindings = program.cached(
        (goes_backward, scope, written),
        lambda: _differentiated_bindings(program, calls, scope, written),
    )
    return not bindings.isdisjoint(_bindings(program, expression))


def _differentiated_bindings(
    program: Program, calls: Iterable[ast.Call], scope: ast.AST, written: str
) -> frozenset[Binding]:
    """What `written` may be where one of these calls of `.backward()` is on it."""
    losses = [
        loss for loss in map(_differentiated, calls) if loss is not None and scope_of(loss) is scope
    ]
    return frozenset(
        binding
        for loss in losses
        if dotted(loss) == written
        for binding in _bindings(program, loss)
    )


def _differentiated(call: ast.Call) -> ast.expr | None:
    """The loss in `loss.backward()`, `(loss / n).backward()` and
    `scaler.scale(loss).backward()`."""
    loss = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
    if isinstance(loss, ast.Call) and last_name(loss.func) == "scale" and loss.args:
        loss = loss.args[0]
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
        loss = loss.left
    return loss


def _bindings(program: Program, expression: ast.expr) -> list[Binding]:
    """Of the name that `outputs.loss` begins with."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return program.bindings(expression) if isinstance(expression, ast.Name) else []


def before_changes(program: Program, name: ast.Name) -> dict[ast.Name, ast.AugAssign]:
    """For a name after `mean /= n`: the name before each such change."""
    changes: dict[ast.Name, ast.AugAssign] = {}
    pending = [name]
    while pending:
        for binding in program.bindings(pending.pop()):
            change = binding.node
            target = change.target if isinstance(change, ast.AugAssign) else None
            if (
                isinstance(change, ast.AugAssign)
                and isinstance(target, ast.Name)
                and target not in changes
            ):
                changes[target] = change
                pending.append(target)
    return changes


DEEPEST = 8
# What they give is a number, or known without the GPU.
OF_HOST = {
    "item", "tolist", "numpy", "size", "dim", "numel", "ndimension", "element_size", "stride", "data_ptr", "cpu",
    "float", "int", "bool", "len", "str", "repr", "isinstance", "type", "id", "range", "hasattr", "getattr",
    "state_dict", "is_contiguous", "get_device", "isfinite_all", "time", "perf_counter",
}  # fmt: skip
HOST_ATTRIBUTES = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "layout",
    "names",
}
NAMED = ("named_parameters", "named_buffers", "named_modules", "named_children")
MODELS = (
    "model",
    "net",
    "network",
    "ddp",
    "ddp_model",
    "criterion",
    "loss_fn",
    "loss_func",
    "classifier",
)


def is_of_step(program: Program, expression: ast.expr | None, depth: int = 0) -> bool:
    """Whether it comes of a forward: what a model gave, and all that is computed from it on the
    GPU."""
    if expression is None or depth > DEEPEST:
        return False
    deeper = depth + 1
    if isinstance(expression, (ast.Name, ast.Attribute)) and goes_backward(program, expression):
        return True
    if isinstance(expression, ast.Name):
        changed = before_changes(program, expression)
        return any(
            _is_name_of_step(program, name, deeper) for name in (expression, *changed)
        ) or any(is_of_step(program, change.value, deeper) for change in changed.values())
    if isinstance(expression, ast.Call):
        return _is_call_of_step(program, expression, deeper)
    if isinstance(expression, ast.Attribute):
        return expression.attr not in HOST_ATTRIBUTES and is_of_step(
            program, expression.value, deeper
        )
    if isinstance(expression, (ast.Subscript, ast.Starred)):
        return is_of_step(program, expression.value, deeper)
    if isinstance(expression, ast.BinOp):
        return any(
            is_of_step(program, operand, deeper) for operand in (expression.left, expression.right)
        )
    if isinstance(expression, ast.Compare):
        is_identity = any(
            isinstance(operator, (ast.Is, ast.IsNot, ast.In, ast.NotIn))
            for operator in expression.ops
        )
        return not is_identity and is_of_step(program, expression.left, deeper)
    if isinstance(expression, ast.UnaryOp):
        return not isinstance(expression.op, ast.Not) and is_of_step(
            program, expression.operand, deeper
        )
    if isinstance(expression, ast.IfExp):
        return any(
            is_of_step(program, branch, deeper) for branch in (expression.body, expression.orelse)
        )
    if isinstance(expression, (ast.GeneratorExp, ast.ListComp)):
        return is_of_step(program, expression.elt, deeper)
    return False


def passed(program: Program, name: ast.Name) -> list[ast.expr]:
    """What callers in the given files give for a parameter; nothing for other names."""
    if program.assigned(name):
        return []
    parameters = [
        binding.node
        for binding in program.bindings(name)
        if binding.kind == "parameter" and isinstance(binding.node, ast.arg)
    ]
    values = [
        expression for parameter in parameters for expression in program.arguments_for(parameter)
    ]
    return [value for value in values if value is not None]


def _is_name_of_step(program: Program, name: ast.Name, depth: int) -> bool:
    sources = [*program.assigned(name), *passed(program, name)]
    over = [
        value.of
        for value in program.values(name)
        if isinstance(value, LoopItem) and not is_key(program, name)
    ]
    return any(is_of_step(program, origin, depth) for origin in (*sources, *over))


def is_key(program: Program, name: ast.Name) -> bool:
    """Whether a loop gives it the keys of a dict: `for k, v in d.items()`, `for k in d: d[k]`; or
    the names of what a model has."""
    bindings = program.bindings(name)
    return bool(bindings) and all(
        binding.kind == "each" and _gives_keys(binding, name) for binding in bindings
    )


def _gives_keys(binding: Binding, name: ast.Name) -> bool:
    over = binding.value
    path = binding.path
    if (
        isinstance(over, ast.Call)
        and last_name(over.func) == "enumerate"
        and over.args
        and path[:1] == (1,)
    ):
        over = over.args[0]
        path = path[1:]
    if isinstance(over, ast.Call) and last_name(over.func) in ("items", "keys", *NAMED):
        return last_name(over.func) == "keys" or path[:1] == (0,)
    loop = parent_of(binding.node) if isinstance(binding.node, ast.comprehension) else binding.node
    if path or over is None or loop is None:
        return False
    taken = [
        subscript
        for subscript in nodes_in(loop, ast.Subscript)
        if isinstance(subscript.slice, ast.Name)
    ]
    return any(
        subscript.slice.id == name.id and ast.dump(subscript.value) == ast.dump(over)
        for subscript in taken
    )


def _is_call_of_step(program: Program, call: ast.Call, depth: int) -> bool:
    name = last_name(call.func)
    if name in OF_HOST or is_given_cpu(call):
        return False
    if is_forward(program, call):
        return True
    function = program.function_of(call)
    if function is not None:
        returned = [statement.value for statement in nodes_in(function, ast.Return)]
        return any(is_of_step(program, value, depth) for value in returned)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return any(is_of_step(program, part, depth) for part in (*call.args, owner))


def is_given_cpu(call: ast.Call) -> bool:
    """`to("cpu")`, `to(device="cpu")`, `to(torch.device("cpu"))`."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    return any(_is_cpu(value) for value in values)


def _is_cpu(device: ast.expr) -> bool:
    if isinstance(device, ast.Call) and last_name(device.func) == "device" and device.args:
        device = device.args[0]
    return isinstance(device, ast.Constant) and device.value == "cpu"


def is_forward(program: Program, call: ast.Call) -> bool:
    values = program.values(call.func)
    for value in values:
        if isinstance(value, CallResult) and (
            value.name in (DDP, *FSDP) or value.name.startswith("torch.nn.")
        ):
            return True
        if isinstance(value, Instance) and program.is_module(value.of):
            return True
    return not values and last_name(call.func).lower() in MODELS
