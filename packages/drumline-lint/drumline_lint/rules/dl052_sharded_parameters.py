"""DL052: code that treats a sharded model as if each rank had all of it.

With FSDP or a ZeroRedundancyOptimizer, a rank has only its shard of parameters, gradients or
states. Each section below is one thing that then is no longer true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.guards import guards, is_main_only
from drumline_lint.program.calls import argument, has_unknown_arguments, number_of
from drumline_lint.program.functions import function_with
from drumline_lint.program.imports import any_text_near, calls_near, connected
from drumline_lint.program.names import DDP, FSDP, GRAD_SCALERS
from drumline_lint.program.origins import depends_on_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    calls_beside,
    dotted,
    is_after,
    nodes_in,
    owner_of,
    statement_of,
)
from drumline_lint.program.value import CallResult, ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS
from drumline_lint.training.saves import Save, saves
from drumline_lint.training.steps import is_method, is_optimizer

RULE = rule("DL052")
_ZERO = "torch.distributed.optim.ZeroRedundancyOptimizer"
_SEEDS = ("torch.manual_seed", "torch.random.manual_seed")
_LOADS = ("load_state_dict", "from_pretrained", "load_checkpoint", "load_model", "init_weights")
_GATHERING = ("get_model_state_dict", "full_tensor", "get_state_dict", "StateDictOptions")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """What holds for a whole model, and not for its shards.

    Examples: an optimizer that is made before `FSDP(model)`, `clip_grad_norm_`, a GradScaler, and
    `optimizer.state_dict()` on rank 0.
    """
    for optimizer in _early_optimizers(program, source):
        message = (
            f"{source.code(optimizer.func)} gets the parameters of the model before it is sharded: "
            "it updates tensors that the model no longer uses"
        )
        fix = "make the optimizer after the model is sharded"
        yield RULE.at(source, optimizer, message, fix=fix, severity=Severity.WARNING)

    yield from _clipped_shards(program, source)
    near = calls_near(program, source, FSDP[0])
    if near and not calls_near(program, source, DDP):  # a flag chooses between the two
        yield from _plain_scalers(program, source)
        yield from _saved_shards(program, source)

    yield from _unconsolidated(program, source)
    yield from _saved_dtensors(program, source)
    yield from _of_different_models(program, source)


# Optimizers of parameters that are replaced.


def _early_optimizers(program: Program, source: Source) -> Iterator[ast.Call]:
    """Optimizers that know the parameters from before.

    optimizer = torch.optim.AdamW(model.parameters())
    model = FSDP(model)
    """
    for wrapping, sharded in _shardings(program, source):
        model = dotted(sharded)
        for call in calls_beside(wrapping):
            if not model or not is_after(wrapping, call):
                continue

            if call.args and _makes_optimizer(program, call) and _takes(program, call, model):
                yield call
            elif optimizer := _made_beside(program, call, model):
                yield optimizer if program.source_of(optimizer) is source else call


def _shardings(program: Program, source: Source) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls that shard a model, with the model, as this file writes it.

    A function that shards its parameter counts, too: `model = shard(model)`.
    """
    for wrapping in program.all_calls(*FSDP):
        model = argument(wrapping, 0, "module")
        if model is None or argument(wrapping, None, "use_orig_params") is not None:
            continue  # the parameters stay the same objects

        if program.source_of(wrapping) is source:
            yield wrapping, model

        for binding in program.bindings(model) if isinstance(model, ast.Name) else ():
            if isinstance(binding.node, ast.arg):
                yield from _shardings_by_function(program, source, binding.node)


def _shardings_by_function(
    program: Program, source: Source, parameter: ast.arg
) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls of a function that shards its parameter, with what they give for it.

    def shard(net):
        return FSDP(net)
    model = shard(model)
    """
    function = function_with(parameter)
    if function is None:
        return

    for caller in program.callers(function):
        model = argument(caller, number_of(function, parameter), parameter.arg)
        if model is not None and program.source_of(caller) is source:
            yield caller, model


def _makes_optimizer(program: Program, call: ast.Call) -> bool:
    """Whether it gives an optimizer: `torch.optim.SGD(...)`, or a function that returns one.

    Schedulers have the same prefix, `torch.optim.lr_scheduler.StepLR`, and are none.
    """
    made = [value.name for value in program.values(call) if isinstance(value, CallResult)]
    return any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in made)


def _takes(program: Program, call: ast.Call, model: str) -> bool:
    """Whether a call gets the model, or its parameters.

    Examples: `SGD(model.parameters())`, `build_optimizer(model)`.
    """
    if program.function_of(call) is not None and model in map(dotted, call.args):
        return True

    for origin in parts(program, call.args[0]):
        for part in nodes_in(origin, ast.Call):
            if not is_method(part, "parameters", "named_parameters"):
                continue
            if dotted(part.func.value) == model:
                return True

    return False


def _made_beside(program: Program, call: ast.Call, model: str) -> ast.Call | None:
    """The optimizer in the function that makes it together with the model.

    model, optimizer = build()
    model = FSDP(model)
    """
    function = program.function_of(call)
    statement = statement_of(call)
    targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if function is None or not isinstance(targets, ast.Tuple):
        return None
    if model not in map(dotted, targets.elts):
        return None

    calls: list[ast.Call] = nodes_in(function, ast.Call)
    if any(program.name_of(inner.func) in FSDP for inner in calls):
        return None
    if not any(is_method(inner, "parameters", "named_parameters") for inner in calls):
        return None

    for inner in calls:
        if inner.args and _makes_optimizer(program, inner):
            return inner
    return None


# Shards of different models.


def _of_different_models(program: Program, source: Source) -> Iterator[Finding]:
    """Shards of models that differ across the ranks: only rank 0 has loaded its weights, or each
    rank has drawn its own.

    if rank == 0:
        model.load_state_dict(torch.load(path))
    model = FSDP(model)
    """
    for call in program.calls(source, FSDP[0]):
        model = argument(call, 0, "module")
        option = argument(call, None, "sync_module_states")
        is_off = option is None or program.values(option) == {ConstantValue(False)}
        if model is None or not is_off or has_unknown_arguments(call):
            continue

        loads = [
            load
            for file in connected(program, source)
            for name in _LOADS
            for load in program.index(file).calls.get(name, ())
        ]
        of_model = [load for load in loads if _is_of_model(program, load, model)]
        if of_model and all(is_main_only(guards(program, load)) for load in of_model):
            message = "only rank 0 has loaded the weights, and the other ranks shard random ones"
        elif not loads and _is_drawn_by_rank(program, call):
            message = "each rank has drawn other weights, and the shards are of different models"
        else:
            continue

        fix = "pass sync_module_states=True, which broadcasts the weights of rank 0"
        yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _is_of_model(program: Program, load: ast.Call, model: ast.expr) -> bool:
    """Whether it loads the weights of this model: `model.load_state_dict(state)`.

    Loads into something else, as an optimizer, say nothing of the shards.
    """
    return bool(program.values(owner_of(load)) & program.values(model))


def _is_drawn_by_rank(program: Program, wrapping: ast.Call) -> bool:
    """Whether the last seed before the model is wrapped has the rank in it.

    torch.manual_seed(42 + rank)
    model = FSDP(Net())
    """
    seeds = [
        call
        for call in calls_beside(wrapping)
        if is_after(wrapping, call) and _seeds_torch(program, call)
    ]
    return bool(seeds) and any(depends_on_rank(program, part) for part in seeds[-1].args)


def _seeds_torch(program: Program, call: ast.Call) -> bool:
    """Whether it seeds torch, itself or in a function that it calls: `seed_everything(rank)`."""
    calls = [call]
    function = program.function_of(call)
    if function is not None:
        calls += nodes_in(function, ast.Call)

    return any(program.name_of(part.func) in _SEEDS for part in calls)


# Gradients of shards.


def _clipped_shards(program: Program, source: Source) -> Iterator[Finding]:
    """`clip_grad_norm_` of FSDP's first version; tensors of the second know their norm.

    model = FSDP(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    for call in program.calls(source, "torch.nn.utils.clip_grad_norm_"):
        if not call.args or _clips_by_model(program, call):
            continue

        if _is_of_shards(program, call.args[0]):
            message = "each rank clips by the norm of its own shards"
            yield RULE.at(source, call, message, fix="call the model's own clip_grad_norm_")


def _clips_by_model(program: Program, clip: ast.Call) -> bool:
    """Whether the model's own clip is beside it, in another branch.

    if use_fsdp:
        model.clip_grad_norm_(1.0)
    else:
        clip_grad_norm_(model.parameters(), 1.0)
    """
    clips = [call for call in calls_beside(clip) if is_method(call, "clip_grad_norm_")]
    return any(not program.name_of(call.func).startswith("torch.nn.") for call in clips)


def _is_of_shards(program: Program, expression: ast.expr) -> bool:
    """Whether it is the parameters of a model that nothing but FSDP wraps.

    model = FSDP(model)
    clip_grad_norm_(model.parameters(), 1.0)
    """
    for part in parts(program, expression):
        if not isinstance(part, ast.Call) or not is_method(part, "parameters"):
            continue

        made = program.made(owner_of(part), *WRAPPERS)
        if made and all(value.name == FSDP[0] for value in made):
            return True

    return False


def _plain_scalers(program: Program, source: Source) -> Iterator[Finding]:
    """A GradScaler beside FSDP's first version.

    One under a condition, or with `enabled=args.amp`, may be for another way to train.
    """
    if any_text_near(program, source, "ShardedGradScaler"):
        return

    for call in program.calls(source, *GRAD_SCALERS):
        option = argument(call, None, "enabled")
        is_on = option is None or program.values(option) == {ConstantValue(True)}
        if is_on and not any(conditions(program, call)):
            message = (
                f"{source.code(call.func)} looks for overflows in this rank's shards only: "
                "some ranks skip a step that others make"
            )
            yield RULE.at(source, call, message, fix="use ShardedGradScaler of torch.distributed")


# States of shards.


def _unconsolidated(program: Program, source: Source) -> Iterator[Finding]:
    """The state of a ZeroRedundancyOptimizer that is not consolidated: each rank has a part of it.

    torch.save(optimizer.state_dict(), path)
    """
    if any_text_near(program, source, "consolidate_state_dict"):
        return

    for call in program.calls(source, f"{_ZERO}.state_dict"):
        message = f"{source.code(call)} is refused: each rank has only its part of the state"
        fix = "call consolidate_state_dict() on every rank before"
        yield RULE.at(source, call, message, fix=fix)


def _saved_shards(program: Program, source: Source) -> Iterator[Finding]:
    """The state of a sharded model's optimizer, that one rank saves.

    if rank == 0:
        torch.save(optimizer.state_dict(), path)
    """
    for save in saves(program, source):
        owners = _owners_of_states(program, save)
        if not any(is_optimizer(program, owner) for owner in owners):
            continue

        if is_main_only(guards(program, save.call)):
            message = "rank 0 saves the optimizer's state of its own shards only"
            fix = "gather it on every rank with FSDP.optim_state_dict, then save on rank 0"
            yield RULE.at(source, save.call, message, fix=fix, severity=Severity.WARNING)


def _saved_dtensors(program: Program, source: Source) -> Iterator[Finding]:
    """The state of a model after `fully_shard(model)`, that one rank saves.

    if rank == 0:
        torch.save(model.state_dict(), path)
    """
    if any_text_near(program, source, *_GATHERING):
        return

    calls = program.calls(source, *FSDP[1:])
    sharded = {dotted(call.args[0]) for call in calls if call.args} - {""}

    for save in saves(program, source) if sharded else ():
        if sharded.isdisjoint(map(dotted, _owners_of_states(program, save))):
            continue

        if is_main_only(guards(program, save.call)):
            message = "rank 0 saves its own shards of the model only"
            fix = "gather it on every rank with get_model_state_dict, then save on rank 0"
            yield RULE.at(source, save.call, message, fix=fix, severity=Severity.WARNING)


def _owners_of_states(program: Program, save: Save) -> list[ast.expr]:
    """The objects whose states are saved: `model` of `torch.save(model.state_dict(), path)`."""
    calls = [part for part in parts(program, save.what) if isinstance(part, ast.Call)]
    owners = [owner_of(call) for call in calls if is_method(call, "state_dict")]
    return [owner for owner in owners if owner is not None]
