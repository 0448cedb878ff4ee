"""What a number of a process is used for: to choose a GPU, to tell who speaks, or to ask for the first on the host."""

from __future__ import annotations

import ast

from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, class_around, last_name, scope_node, statement_of

_CHOOSING = {
    "device",
    "to",
    "cuda",
    "set_device",
    "set_device_index",
    "device_index",
    "get_device_properties",
    "get_device_name",
}
_SAYING = {"print", "debug", "info", "warning", "error", "log", "print_rank", "format"}
_GIVEN_AS = {"device", "device_id", "device_ids", "output_device", "map_location", "index"}
_TURNED_INTO = {"int", "str"}


def is_for_this_host_only(program: Program, target: ast.expr) -> bool:
    """Whether all that is made of a variable or attribute concerns one host: of those that are never read, not."""
    setting = statement_of(target)
    uses = [use for use in _uses(program, target) if setting not in above(use)]
    return bool(uses) and all(_is_for_this_host(use) for use in uses)


def _uses(program: Program, target: ast.expr) -> list[ast.expr]:
    """Where it is read: a variable in its scope and those inside, an attribute in its class."""
    index = program.index(program.source_of(target))
    if isinstance(target, ast.Name):
        scope = scope_node(target)
        return [
            one
            for one in index.every(ast.Name)
            if one.id == target.id
            and isinstance(one.ctx, ast.Load)
            and scope in (scope_node(one), *above(one))
        ]
    owner = class_around(scope_node(target)) if isinstance(target, ast.Attribute) else None
    if owner is None or not isinstance(target, ast.Attribute):
        return []
    return [
        one
        for one in index.every(ast.Attribute)
        if one.attr == target.attr and isinstance(one.ctx, ast.Load) and owner in above(one)
    ]


def _is_for_this_host(use: ast.expr) -> bool:
    """By what is around it: `torch.device("cuda", rank)`, `f"cuda:{rank}"`, `print(rank)`, `rank == 0`."""
    for outer in above(use):
        if isinstance(outer, ast.Compare):
            return all(
                isinstance(one, ast.Constant) for one in (outer.left, *outer.comparators) if one is not use
            )
        if isinstance(outer, ast.keyword) and outer.arg in _GIVEN_AS:
            return True
        if isinstance(outer, ast.JoinedStr) and _names_a_device(outer):
            return True
        if isinstance(outer, ast.Call) and last_name(outer.func) not in _TURNED_INTO:
            return last_name(outer.func) in (*_CHOOSING, *_SAYING)
        if isinstance(outer, ast.Subscript | ast.BinOp | ast.stmt):
            return False
    return False


def _names_a_device(text: ast.JoinedStr) -> bool:
    """`f"cuda:{rank}"`, `f"{kind}:{rank}"`, and nothing else."""
    colons = [one.value for one in text.values if isinstance(one, ast.Constant)]
    return (
        len(colons) == 1
        and isinstance(colons[0], str)
        and colons[0].lower() in ("cuda:", "xpu:", "npu:", ":")
    )
