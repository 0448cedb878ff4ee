"""Whether a model has buffers, which DDP sends from rank 0 to the others when it is run."""

from __future__ import annotations

import ast
import builtins
import sys

from drumline.lint.program.arguments import argument
from drumline.lint.program.making import LARGEST
from drumline.lint.program.program import Program
from drumline.lint.program.value import Class, Function, Instance, Library, Made, Method, Value
from drumline.lint.training.moving import built_of

_WITH_BUFFERS = ("BatchNorm", "spectral_norm", "Buffer", "register_buffer", "parametrizations")
_LOADING = ("load", "load_state_dict_from_url")
# They have running means only where they are told so.
_WITH_BUFFERS_IF_TOLD = ("InstanceNorm",)


def may_have_buffers(program: Program, model: ast.expr | None) -> bool:
    """Not if all that the model is built of is seen, and none of it has any."""
    values = program.values(model)
    if not values or not all(_is_seen(program, value) for value in values):
        return True
    nodes = list(built_of(program, model))
    return len(nodes) >= LARGEST or any(_may_bring(program, node) for node in nodes)


def _is_seen(program: Program, value: Value) -> bool:
    """A module of the given files that comes from nothing else than torch, or one of torch.nn."""
    if isinstance(value, Instance):
        bases = [place for place in program.ancestry(value.of) if isinstance(place, str)]
        return bool(bases) and all(base.startswith("torch.nn.") or base == "object" for base in bases)
    return isinstance(value, Made) and value.name.startswith("torch.nn.")


def _may_bring(program: Program, node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.Attribute):
        name = program.name_of(node)
        return name.startswith("torch.") and any(word in name for word in _WITH_BUFFERS)
    if not isinstance(node, ast.Call):
        return False
    values = program.values(node.func)
    return not values or any(_gives_buffers(program, value, node) for value in values)


def _gives_buffers(program: Program, called: Value, call: ast.Call) -> bool:
    """Of what is called: whether a module with buffers may come of it, for all that is known."""
    if isinstance(called, Function):
        return False  # what it does is looked at by itself
    if isinstance(called, Class):
        value = Instance(called.node)
        return program.is_module(called.node) and not _is_seen(program, value)
    if isinstance(called, Library | Method):
        return _gives_by_name(program.name_of(call.func), call)
    return not isinstance(called, Instance | Made)


def _gives_by_name(name: str, call: ast.Call) -> bool:
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    if any(word in name for word in _WITH_BUFFERS):
        return name.startswith("torch.") and "convert_sync_batchnorm" not in name
    if any(word in name for word in _WITH_BUFFERS_IF_TOLD):
        return argument(call, None, "track_running_stats") is not None
    if root == "torch":
        return last in _LOADING or (last[:1].isupper() and not name.startswith("torch.nn."))
    return not (hasattr(builtins, root) or root in sys.stdlib_module_names)
