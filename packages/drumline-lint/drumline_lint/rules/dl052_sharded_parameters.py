"""DL052: an optimizer or a norm of a sharded model that knows only other parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rank_tests_at
from drumline_lint.flow.guards import is_main_only
from drumline_lint.program.names import FSDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import dotted, last_name, nodes_in, position, scope_of
from drumline_lint.program.value import CallResult
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves
from drumline_lint.training.steps import is_optimizer

RULE = rule("DL052")
_CLIPPING = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Optimizers that are made before the model is sharded, and norms of the shards alone."""
    for optimizer in _early_optimizers(program, source):
        message = (
            f"{source.code(optimizer.func)} gets the parameters of the model before it is sharded: "
            "it updates tensors that the model no longer uses"
        )
        yield RULE.at(
            source, optimizer, message, fix="make the optimizer after the model is sharded"
        )
    for call in program.calls(source, *_CLIPPING):
        if call.args and any(_is_of_shards(program, part) for part in parts(program, call.args[0])):
            message = "each rank clips by the norm of its own shards"
            yield RULE.at(source, call, message, fix="call the model's own clip_grad_norm_")
    yield from _saved_shards(program, source)


def _saved_shards(program: Program, source: Source) -> Iterator[Finding]:
    """`optimizer.state_dict()` of a sharded model, that one rank saves."""
    if next(program.all_calls(FSDP[0]), None) is None:
        return
    for save in saves(program, source):
        contents = [part for part in parts(program, save.what) if isinstance(part, ast.Call)]
        states = [call for call in contents if last_name(call.func) == "state_dict"]
        is_of_optimizer = any(
            isinstance(call.func, ast.Attribute) and is_optimizer(program, call.func.value)
            for call in states
        )
        if is_of_optimizer and is_main_only(frozenset(rank_tests_at(program, save.call))):
            message = "rank 0 saves the optimizer's state of its own shards only"
            fix = "gather it on every rank with FSDP.optim_state_dict, then save on rank 0"
            yield RULE.at(source, save.call, message, fix=fix)


def _early_optimizers(program: Program, source: Source) -> Iterator[ast.Call]:
    for wrapping in program.calls(source, *FSDP):
        model = dotted(wrapping.args[0]) if wrapping.args else ""
        calls = nodes_in(scope_of(wrapping), ast.Call) if model else []
        before = [call for call in calls if call.args and position(call) < position(wrapping)]
        for call in before:
            if _makes_optimizer(program, call) and _takes(program, call, model):
                yield call


def _makes_optimizer(program: Program, call: ast.Call) -> bool:
    made = [value.name for value in program.values(call) if isinstance(value, CallResult)]
    return any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in made)


def _takes(program: Program, call: ast.Call, model: str) -> bool:
    """Whether it gets the model, or its parameters."""
    is_given = program.function_of(call) is not None and model in map(dotted, call.args)
    return is_given or _has_parameters_of(program, call.args[0], model)


def _has_parameters_of(program: Program, expression: ast.expr, model: str) -> bool:
    return any(
        isinstance(part, ast.Call)
        and last_name(part.func) in ("parameters", "named_parameters")
        and isinstance(part.func, ast.Attribute)
        and dotted(part.func.value) == model
        for origin in parts(program, expression)
        for part in nodes_in(origin, ast.Call)
    )


def _is_of_shards(program: Program, part: ast.expr) -> bool:
    """`model.parameters()` of FSDP's first version; tensors of the second know their norm."""
    if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
        return False
    return part.func.attr == "parameters" and bool(program.made(part.func.value, FSDP[0]))
