"""DL073: some steps leave parameters without a gradient, and DDP waits for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, ancestors, last_name, nodes_in, scope_of
from drumline_lint.program.value import CallResult, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wrapped

RULE = rule("DL073", in_tests=False)
_LISTS = ("torch.nn.ModuleDict", "torch.nn.ModuleList")
_DRAWS = ("random.random", "random.choice", "random.randint", "torch.rand", "numpy.random.rand")
_OPTIONS = ("find_unused_parameters", "static_graph")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models of which a forward uses one of several parts, and layers that are used nowhere."""
    for call in program.calls(source, DDP):
        options = [argument(call, None, name) for name in _OPTIONS]
        if any(options) or has_unknown_arguments(call):
            continue
        for value in program.values(wrapped(call)):
            part = _unused(program, value.of) if isinstance(value, Instance) else ""
            if part:
                message = (
                    f"{part} has no gradient in some steps, and DDP waits for it: "
                    "the next step raises a RuntimeError"
                )
                yield RULE.at(source, call, message)


def _unused(program: Program, model: ast.ClassDef) -> str:
    """A part of the model that not every forward uses; empty if none is known."""
    forward = program.method(model, "forward")
    making = program.method(model, "__init__")
    if forward is None or making is None:
        return ""
    if part := _unreached(program, forward):
        return part
    layers = _layers(program, making)
    for name, kind in layers.items():
        if kind in _LISTS and _is_one_chosen(program, forward, name):
            return f"what is not chosen of self.{name}"
        if kind not in _LISTS and _is_named_nowhere(program, model, name):
            return f"self.{name}"
        if _is_drawn(program, forward, name):
            return f"self.{name}"
    return ""


def _unreached(program: Program, forward: FunctionNode) -> str:
    """A layer of a part of the model, of which another method than `forward` is called:
    `self.backbone.hidden(x)`, where only `forward` uses the head."""
    run = [forward, *_functions_run(program, forward)]
    for call in nodes_in(forward, ast.Call):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(owner, ast.Attribute) or last_name(owner.value) != "self":
            continue
        kinds = [value.of for value in program.values(owner) if isinstance(value, Instance)]
        for kind in kinds if program.function_of(call) is not None else ():
            making = program.method(kind, "__init__")
            for name in _layers(program, making) if making is not None else ():
                read = _readers(program, name)
                if read and making not in read and not any(function in run for function in read):
                    return f"self.{owner.attr}.{name}"
    return ""


def _functions_run(program: Program, function: FunctionNode) -> list[FunctionNode]:
    called = [program.function_of(call) for call in calls_made_in(program, function)]
    return [inner for inner in called if inner is not None]


def _readers(program: Program, name: str) -> list[ast.AST]:
    """The functions that use a layer; all code that names it counts, whatever it names."""
    return [
        scope_of(node)
        for source in program.sources
        for node in program.index(source).every(ast.Attribute)
        if node.attr == name and isinstance(node.ctx, ast.Load)
    ]


def _layers(program: Program, making: ast.AST) -> dict[str, str]:
    """The layers of torch.nn with parameters that a constructor makes, by their names."""
    layers: dict[str, str] = {}
    for statement in nodes_in(making, ast.Assign):
        target = statement.targets[0]
        kinds = [
            value.name for value in program.values(statement.value) if isinstance(value, CallResult)
        ]
        is_own = isinstance(target, ast.Attribute) and last_name(target.value) == "self"
        if is_own and len(kinds) == 1 and kinds[0] in (*_LISTS, *_WITH_PARAMETERS):
            layers[last_name(target)] = kinds[0]
    return layers


_WITH_PARAMETERS = tuple(
    f"torch.nn.{name}" for name in "Linear Conv1d Conv2d Conv3d Embedding LSTM GRU".split()
)


def _uses(function: ast.AST, name: str) -> list[ast.Attribute]:
    every = nodes_in(function, ast.Attribute)
    return [node for node in every if node.attr == name and last_name(node.value) == "self"]


def _is_one_chosen(program: Program, forward: ast.AST, name: str) -> bool:
    """`self.heads[task](x)`, where that is the only use, and no loop goes over all."""
    uses = _uses(forward, name)
    chosen = [
        node
        for node in nodes_in(forward, ast.Subscript)
        if isinstance(node.value, ast.Attribute) and node.value in uses
    ]
    are_single = all(isinstance(node.slice, ast.Name) for node in chosen)
    loops = (ast.For, ast.comprehension, ast.ListComp, ast.GeneratorExp, ast.DictComp)
    is_in_loop = any(isinstance(outer, loops) for use in uses for outer in ancestors(use))
    return bool(chosen) and len(chosen) == len(uses) and are_single and not is_in_loop


def _is_named_nowhere(program: Program, model: ast.ClassDef, name: str) -> bool:
    """Whether nothing reads it: neither the class, nor any other code by an attribute or text."""
    for source in program.sources:
        reads = [
            node
            for node in program.index(source).every(ast.Attribute)
            if node.attr == name and isinstance(node.ctx, ast.Load)
        ]
        if reads or f'"{name}"' in source.text or "getattr" in source.text:
            return False
    return True


def _is_drawn(program: Program, forward: ast.AST, name: str) -> bool:
    """`if random.random() < 0.5: x = self.layer(x)`"""
    uses = _uses(forward, name)
    branches = [branch for branch in nodes_in(forward, ast.If) if _draws(program, branch.test)]
    return bool(uses) and any(all(branch in ancestors(use) for use in uses) for branch in branches)


def _draws(program: Program, test: ast.expr) -> bool:
    return any(program.name_of(call.func) in _DRAWS for call in nodes_in(test, ast.Call))
