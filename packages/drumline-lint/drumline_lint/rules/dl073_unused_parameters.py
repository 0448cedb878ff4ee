"""DL073: some steps leave parameters without a gradient, and DDP waits for them.

DDP waits for the gradient of every parameter, unless it is told to look for unused ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near, calls_near
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, last_name, nodes_in
from drumline_lint.program.value import CallResult, ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wrapped

RULE = rule("DL073", in_tests=False)

_LISTS = ("torch.nn.ModuleDict", "torch.nn.ModuleList")
_LAYERS = tuple(f"torch.nn.{name}" for name in "Linear Conv1d Conv2d Conv3d Embedding".split())
_LOOPS = (ast.For, ast.comprehension, ast.ListComp, ast.GeneratorExp, ast.DictComp)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models of which a forward uses one of several parts, and layers that are used nowhere.

    For example:

        class Model(nn.Module):
            def __init__(self):
                self.heads = nn.ModuleDict({"a": Head(), "b": Head()})

            def forward(self, x, task):
                return self.heads[task](x)

        model = DDP(Model())
    """
    for call in program.calls(source, DDP):
        option = argument(call, None, "find_unused_parameters")
        if program.values(option) == {ConstantValue(True)} and _is_reentrant(program, source):
            message = (
                "find_unused_parameters marks the parameters of reentrant checkpoints twice: "
                "the backward pass raises a RuntimeError"
            )
            yield RULE.at(source, call, message, fix="checkpoint with use_reentrant=False")

        if option or argument(call, None, "static_graph") or has_unknown_arguments(call):
            continue

        for value in program.values(wrapped(call)):
            part = _unused(program, value.of) if isinstance(value, Instance) else ""
            if part:
                message = (
                    f"{part} has no gradient in some steps, and DDP waits for it: "
                    "the next step raises a RuntimeError"
                )
                yield RULE.at(source, call, message)


def _is_reentrant(program: Program, source: Source) -> bool:
    """Whether activations are checkpointed in the way that runs a backward pass inside another.

    For example:

        x = checkpoint(block, x, use_reentrant=True)
    """
    if any_text_near(program, source, "use_reentrant=False", '"use_reentrant": False'):
        return False
    if any_text_near(program, source, '"use_reentrant": True'):
        return True

    calls = calls_near(program, source, "torch.utils.checkpoint.checkpoint")
    options = [argument(call, None, "use_reentrant") for call in calls]
    return any(program.values(option) == {ConstantValue(True)} for option in options)


def _unused(program: Program, model: ast.ClassDef) -> str:
    """A part of the model that not every forward uses; empty if none is known.

    It is `self.head` here, which no other code names:

        def __init__(self):
            self.head = nn.Linear(512, 10)
    """
    forward = program.method(model, "forward")
    making = program.method(model, "__init__")
    if forward is None or making is None:
        return ""  # it may be another class's

    for statement in nodes_in(making, ast.Assign):
        target = statement.targets[0]
        if not isinstance(target, ast.Attribute) or last_name(target.value) != "self":
            continue

        values = program.values(statement.value)
        made = [value.name for value in values if isinstance(value, CallResult)]
        if not made:
            continue

        if made[0] in _LISTS and _is_one_chosen(forward, target.attr):
            return f"what is not chosen of self.{target.attr}"
        if made[0] in _LAYERS and _is_named_nowhere(program, target.attr):
            return f"self.{target.attr}"

    return ""


def _is_one_chosen(forward: ast.AST, name: str) -> bool:
    """Whether the only use of a list of modules takes one of them, and no loop goes over all.

    For example:

        return self.heads[task](x)
    """
    uses = [node for node in nodes_in(forward, ast.Attribute) if node.attr == name]
    chosen = [node for node in nodes_in(forward, ast.Subscript) if node.value in uses]
    if not chosen or len(chosen) != len(uses):
        return False

    is_single = all(isinstance(node.slice, ast.Name) for node in chosen)
    is_in_loop = any(isinstance(outer, _LOOPS) for use in uses for outer in ancestors(use))
    return is_single and not is_in_loop


def _is_named_nowhere(program: Program, name: str) -> bool:
    """Whether no code reads it, by an attribute or text.

    For example:

        self.head(x)
        getattr(self, "head")
    """
    for source in program.sources:
        if "getattr" in source.text or f'"{name}"' in source.text:
            return False

        for node in program.index(source).every(ast.Attribute):
            if node.attr == name and isinstance(node.ctx, ast.Load):
                return False
    return True
