"""The parts of a model, and where its forward uses them."""

from __future__ import annotations

import ast

from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, above, inside, up
from drumline_lint.program.value import Instance, Made

WITHOUT_PARAMETERS = (
    "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "Dropout", "Flatten", "Identity", "Pool",
    "Upsample", "Unflatten", "Loss", "Softplus", "Hardswish", "ELU", "LeakyReLU", "Pad", "Unfold", "Fold",
)  # fmt: skip


def outputs(forward: FunctionNode) -> list[ast.expr]:
    """What a forward with one way out returns."""
    returns = [one.value for one in inside(forward, ast.Return)]
    return [*returns[0].elts] if len(returns) == 1 and isinstance(returns[0], ast.Tuple) else []


def parts_used(owner: ast.ClassDef) -> dict[str, list[ast.Attribute]]:
    """Where each `self.part` is read, but for `__init__`."""
    found: dict[str, list[ast.Attribute]] = {}
    for function in owner.body:
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            for node in inside(function, ast.Attribute, into_functions=True):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.setdefault(node.attr, []).append(node)
    return found


def flows_only_into(forward: FunctionNode, use: ast.AST, output: ast.expr) -> bool:
    """It is written in the output, or assigned to a name that only the output reads."""
    around = list(above(use))
    if output in around:
        return True
    statement = next((one for one in around if isinstance(one, ast.stmt)), None)
    if not isinstance(statement, ast.Assign) or up(statement) is not forward or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Name):
        return False
    reads = [
        one
        for one in inside(forward, ast.Name, into_functions=True)
        if one.id == target.id and isinstance(one.ctx, ast.Load)
    ]
    return bool(reads) and all(one is output or output in above(one) for one in reads)


def has_parameters(program: Program, owner: ast.ClassDef, part: str) -> bool:
    """Whether `self.part = nn.Linear(...)`, or a module of the given files, was assigned."""
    for target, binding in program.index(program.source_of(owner)).attributes.get(part, ()):
        if owner not in above(target) or binding.value is None:
            continue
        for value in program.values(binding.value):
            if isinstance(value, Instance) and program.is_module(value.of):
                return True
            if isinstance(value, Made) and value.name.startswith("torch.nn."):
                return not any(value.name.endswith(one) or one in value.name for one in WITHOUT_PARAMETERS)
    return False
