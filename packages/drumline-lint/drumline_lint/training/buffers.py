"""Whether a model has buffers, which DDP sends from rank 0 to the others when it is run."""

from __future__ import annotations

import ast
import builtins
import sys

from drumline_lint.program.arguments import argument, has_unknown_arguments
from drumline_lint.program.making import LARGEST
from drumline_lint.program.program import Program
from drumline_lint.program.tree import is_called, up
from drumline_lint.program.value import Class, Function, Instance, Known, Library, Made, Method, Value
from drumline_lint.training.moving import built_of

_WITH_BUFFERS = ("spectral_norm", "Buffer", "register_buffer", "parametrizations")
_LOADING = ("load", "load_state_dict_from_url")
# Norms that keep running means where they are told to, and whether they do if nothing is said.
_KEEPING_MEANS = {"BatchNorm": True, "InstanceNorm": False}
# Methods of text, and those that fill a list: what they are given is looked at by itself.
_BRINGING_NOTHING = {*dir(str), "append", "extend", "insert"}


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
        is_for_another = is_called(node) or isinstance(up(node), ast.Attribute)
        return not is_for_another and name.startswith("torch.") and _brings_by_name(name)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in _BRINGING_NOTHING:
        return False
    values = program.values(node.func)
    return not values or any(_gives_buffers(program, value, node) for value in values)


def _brings_by_name(name: str) -> bool:
    """If nothing is said to it."""
    norms = [word for word, keeps in _KEEPING_MEANS.items() if keeps]
    return any(word in name for word in (*_WITH_BUFFERS, *norms)) and "convert_sync_batchnorm" not in name


def _keeps_means(program: Program, call: ast.Call, unless_told: bool) -> bool:
    told = argument(call, 4, "track_running_stats")
    if told is None:
        return unless_told or has_unknown_arguments(call)
    return program.values(told) != {Known(False)}


def _gives_buffers(program: Program, called: Value, call: ast.Call) -> bool:
    """Of what is called: whether a module with buffers may come of it, for all that is known."""
    if isinstance(called, Function):
        return False  # what it does is looked at by itself
    if isinstance(called, Class):
        value = Instance(called.node)
        return program.is_module(called.node) and not _is_seen(program, value)
    if isinstance(called, Library | Method):
        return _gives_by_name(program, program.name_of(call.func), call)
    return not isinstance(called, Instance | Made)


def _gives_by_name(program: Program, name: str, call: ast.Call) -> bool:
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    if any(word in name for word in _WITH_BUFFERS):
        return name.startswith("torch.")
    for word, keeps in _KEEPING_MEANS.items():
        if word in last:
            return name.startswith("torch.") and _keeps_means(program, call, unless_told=keeps)
    if root == "torch":
        return last in _LOADING or (last[:1].isupper() and not name.startswith("torch.nn."))
    return not (hasattr(builtins, root) or root in sys.stdlib_module_names)
