"""DL052: an optimizer or a norm of a sharded model that knows only other parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.guards import is_main_only
from drumline_lint.program.calls import argument, number_of
from drumline_lint.program.functions import function_with
from drumline_lint.program.imports import any_text_near, connected
from drumline_lint.program.names import DDP, FSDP, GRAD_SCALERS
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import dotted, last_name, nodes_in, position, scope_of
from drumline_lint.program.value import CallResult, ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS
from drumline_lint.training.saves import saves
from drumline_lint.training.steps import is_optimizer

RULE = rule("DL052")
_ZERO = "torch.distributed.optim.ZeroRedundancyOptimizer"
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
        of_shards = call.args and any(
            _is_of_shards(program, part) for part in parts(program, call.args[0])
        )
        if of_shards and not _clips_otherwise(program, call):
            message = "each rank clips by the norm of its own shards"
            yield RULE.at(source, call, message, fix="call the model's own clip_grad_norm_")
    yield from _saved_shards(program, source)
    yield from _plain_scalers(program, source)
    yield from _unconsolidated(program, source)


def _plain_scalers(program: Program, source: Source) -> Iterator[Finding]:
    """A GradScaler beside FSDP's first version; the tensors of the second know of each other."""
    scalers = list(program.calls(source, *GRAD_SCALERS))
    near = connected(program, source) if scalers else frozenset()
    is_sharded = any(next(program.calls(file, FSDP[0]), None) for file in near)
    is_replicated = any(next(program.calls(file, DDP), None) for file in near)
    if not is_sharded or is_replicated or any_text_near(program, source, "ShardedGradScaler"):
        return  # a flag chooses between the two
    for call in scalers:
        option = argument(call, None, "enabled")
        if any(conditions(program, call)):
            continue  # it may be that of another way to train
        if option is None or program.values(option) == {ConstantValue(True)}:
            message = (
                f"{source.code(call.func)} looks for overflows in this rank's shards only: "
                "some ranks skip a step that others make"
            )
            yield RULE.at(source, call, message, fix="use ShardedGradScaler of torch.distributed")


def _unconsolidated(program: Program, source: Source) -> Iterator[Finding]:
    """The state of a ZeroRedundancyOptimizer, of which each rank has a part until it is
    consolidated."""
    for call in program.calls(source, f"{_ZERO}.state_dict"):
        if any("consolidate_state_dict" in file.text for file in program.sources):
            return
        message = f"{source.code(call)} is refused: each rank has only its part of the state"
        fix = "call consolidate_state_dict() on every rank before"
        yield RULE.at(source, call, message, fix=fix)


def _saved_shards(program: Program, source: Source) -> Iterator[Finding]:
    """`optimizer.state_dict()` of a sharded model, that one rank saves."""
    if next(program.all_calls(FSDP[0]), None) is None:
        return
    for save in saves(program, source):
        contents = [part for part in parts(program, save.what) if isinstance(part, ast.Call)]
        states = [call for call in contents if last_name(call.func) == "state_dict"]
        is_of_optimizer = any(
            isinstance(call.func, ast.Attribute) and _has_shards(program, call.func.value)
            for call in states
        )
        if is_of_optimizer and is_main_only(frozenset(rank_tests_at(program, save.call))):
            message = "rank 0 saves the optimizer's state of its own shards only"
            fix = "gather it on every rank with FSDP.optim_state_dict, then save on rank 0"
            yield RULE.at(source, save.call, message, fix=fix)


def _has_shards(program: Program, optimizer: ast.expr) -> bool:
    """Whether it is made for the parameters of a sharded model, as far as that is seen; one that is
    given by a caller, if nothing here wraps in DDP."""
    if not is_optimizer(program, optimizer):
        return False
    made = [value.call for value in program.values(optimizer) if isinstance(value, CallResult)]
    models = [part for call in made for value in call.args for part in parts(program, value)]
    if any(_is_of_shards(program, part) for part in models):
        return True
    near = connected(program, program.source_of(optimizer))
    calls = [next(program.calls(file, FSDP[0]), None) for file in near]
    return any(calls) and not any(next(program.calls(file, DDP), None) for file in near)


def _early_optimizers(program: Program, source: Source) -> Iterator[ast.Call]:
    for wrapping, sharded in _shardings(program, source):
        model = dotted(sharded)
        calls = nodes_in(scope_of(wrapping), ast.Call) if model else []
        before = [call for call in calls if call.args and position(call) < position(wrapping)]
        for call in before:
            if _makes_optimizer(program, call) and _takes(program, call, model):
                yield call


def _shardings(program: Program, source: Source) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls that shard a model, themselves or in a function that gets it, with the model."""
    for wrapping in program.all_calls(*FSDP):
        model = argument(wrapping, 0, "module")
        if argument(wrapping, None, "use_orig_params") is not None:
            continue  # the parameters stay the same objects
        if model is not None and program.source_of(wrapping) is source:
            yield wrapping, model
        parameters = program.bindings(model) if isinstance(model, ast.Name) else []
        for parameter in (binding.node for binding in parameters):
            if isinstance(parameter, ast.arg):
                yield from _shardings_by_function(program, source, parameter)


def _shardings_by_function(
    program: Program, source: Source, parameter: ast.arg
) -> Iterator[tuple[ast.Call, ast.expr]]:
    function = function_with(parameter)
    for caller in [] if function is None else program.callers(function):
        number = None if function is None else number_of(function, parameter)
        model = argument(caller, number, parameter.arg)
        if model is not None and program.source_of(caller) is source:
            yield caller, model


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


def _clips_otherwise(program: Program, clip: ast.Call) -> bool:
    """`model.clip_grad_norm_(...)` in the same function, if the model is sharded."""
    calls = nodes_in(scope_of(clip), ast.Call)
    return any(
        last_name(call.func) == "clip_grad_norm_" and program.name_of(call.func) not in _CLIPPING
        for call in calls
    )


def _is_of_shards(program: Program, part: ast.expr) -> bool:
    """`model.parameters()` of FSDP's first version; tensors of the second know their norm."""
    if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
        return False
    wrappings = program.made(part.func.value, *WRAPPERS)
    is_sharded = bool(wrappings) and all(wrapping.name == FSDP[0] for wrapping in wrappings)
    return part.func.attr == "parameters" and is_sharded
