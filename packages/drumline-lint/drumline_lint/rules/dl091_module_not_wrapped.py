"""DL091: a module is trained whose gradients nothing averages."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import is_single_process
from drumline_lint.flow.loops import batch_loops
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import ACCELERATOR, DDP
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import dotted, nodes_in, owner_of, scope_of
from drumline_lint.program.value import CallResult, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS, wrapped
from drumline_lint.training.steps import is_method

RULE = rule("DL091")
_OPTIMIZERS = set(
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS NAdam RAdam RMSprop Rprop SGD".split()
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Parameters of an optimizer beside those of a wrapped model, and models that
    `accelerator.prepare` does not get."""
    yield from _unprepared(program, source)
    if any_text_near(program, source, "all_reduce", "allreduce", "average_gradients"):
        return
    wrapped_names = _wrapped_names(program)
    for call in _optimizers(program, source):
        owners = _trained(program, call)
        if not any(program.made(owner, DDP) for owner in owners):
            continue
        for owner in owners:
            name = dotted(owner)
            is_wrapped = name in wrapped_names or _is_part_of_wrapped(program, owner)
            is_known = bool(name) and name.partition(".")[0] not in wrapped_names
            if is_known and not is_wrapped and _is_bare(program, owner):
                message = (
                    f"{name} is trained beside the wrapped model, and is not wrapped itself: "
                    "its gradients are not averaged, and the replicas differ from the first step on"
                )
                fix = f"wrap {name} in DDP as well, or make it a part of the wrapped model"
                makers = [
                    part for part in written_values(program, owner) if _is_in(program, part, source)
                ]
                place = makers[0] if makers else call
                yield RULE.at(source, place, message, fix=fix)


def _is_in(program: Program, part: ast.expr, source: Source) -> bool:
    return isinstance(part, ast.Call) and program.source_of(part) is source


def _optimizers(program: Program, source: Source) -> Iterator[ast.Call]:
    index = program.index(source)
    for call in (call for name in _OPTIMIZERS & index.calls.keys() for call in index.calls[name]):
        if call.args and program.name_of(call.func).startswith("torch.optim."):
            yield call


def _trained(program: Program, optimizer: ast.Call) -> list[ast.expr]:
    """The modules whose parameters it gets."""
    calls = [part for part in parts(program, optimizer.args[0]) if isinstance(part, ast.Call)]
    owners = [owner_of(call) for call in calls if is_method(call, "parameters", "named_parameters")]
    return [owner for owner in owners if owner is not None]


def _wrapped_names(program: Program) -> set[str]:
    """What is wrapped somewhere, as it is written."""
    models = [wrapped(call) for call in program.all_calls(*WRAPPERS)]
    return {dotted(model) for model in models if model is not None} - {""}


def _is_part_of_wrapped(program: Program, owner: ast.expr) -> bool:
    """`ddp_model.module.classifier`."""
    while isinstance(owner, ast.Attribute):
        owner = owner.value
        if program.made(owner, DDP):
            return True
    return False


def _is_bare(program: Program, owner: ast.expr) -> bool:
    """Whether it is known to be a module with parameters, and that nothing wraps it."""
    values = program.values(owner)
    classes = [value.of for value in values if isinstance(value, Instance)]
    made = [value.name for value in values if isinstance(value, CallResult)]
    is_layer = all(name.startswith("torch.nn.") and name not in WRAPPERS for name in made)
    return (
        bool(values)
        and len(classes) + len(made) == len(values)
        and is_layer
        and all(program.is_module(class_) for class_ in classes)
        and not is_single_process(program, owner)
    )


def _unprepared(program: Program, source: Source) -> Iterator[Finding]:
    """`optimizer, loader = accelerator.prepare(optimizer, loader)`, and a model that is trained."""
    prepares = list(program.calls(source, f"{ACCELERATOR}.prepare"))
    if len(prepares) != 1 or any_text_near(program, source, "prepare_model", "DeepSpeed"):
        return
    prepare = prepares[0]
    prepared = {dotted(value) for value in prepare.args}
    for optimizer in _optimizers(program, source):
        if not any(optimizer in parts(program, value) for value in prepare.args):
            continue
        models = {dotted(owner) for owner in _trained(program, optimizer)} - {""}
        run = {
            dotted(call.func)
            for loop in batch_loops(program, source)
            if scope_of(loop) is scope_of(prepare)
            for call in nodes_in(loop, ast.Call)
        }
        for name in sorted((models & run) - prepared):
            message = (
                f"accelerator.prepare gets the optimizer of {name}, and not {name}: "
                "nothing averages its gradients, and the replicas differ from the first step on"
            )
            fix = f"pass {name} to accelerator.prepare as well"
            yield RULE.at(source, prepare, message, fix=fix, severity=Severity.WARNING)
