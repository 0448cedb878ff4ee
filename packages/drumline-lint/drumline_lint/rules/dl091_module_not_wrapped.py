"""DL091: a module is trained whose gradients nothing averages.

DDP averages the gradients of the model that it wraps, and of no other.
"""

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
    `accelerator.prepare` does not get.

    For example:

        model = DDP(model)
        head = nn.Linear(512, 10)
        optimizer = Adam([*model.parameters(), *head.parameters()])
    """
    yield from _unprepared(program, source)
    if any_text_near(program, source, "all_reduce", "allreduce", "average_gradients"):
        return

    wrapped_names = _wrapped_names(program)
    for optimizer in _optimizers(program, source):
        owners = _trained(program, optimizer)
        if not any(program.made(owner, DDP) for owner in owners):
            continue

        for owner in owners:
            name = dotted(owner)
            if not name or {name, name.partition(".")[0]} & wrapped_names:
                continue

            if _is_bare(program, owner) and not _is_part_of_wrapped(program, owner):
                message = (
                    f"{name} is trained beside the wrapped model, and is not wrapped itself: "
                    "its gradients are not averaged, and the replicas differ from the first step on"
                )
                fix = f"wrap {name} in DDP as well, or make it a part of the wrapped model"
                place = _maker(program, source, owner) or optimizer
                yield RULE.at(source, place, message, fix=fix)


def _maker(program: Program, source: Source, owner: ast.expr) -> ast.expr | None:
    """The call of this file that makes a module.

    It is `nn.Linear(512, 10)` for `head`, after:

        head = nn.Linear(512, 10)
    """
    for value in written_values(program, owner):
        if isinstance(value, ast.Call) and program.source_of(value) is source:
            return value
    return None


def _optimizers(program: Program, source: Source) -> Iterator[ast.Call]:
    """The calls that make an optimizer of torch: `torch.optim.Adam(model.parameters())`."""
    calls = program.index(source).calls
    for name in _OPTIMIZERS & calls.keys():
        for call in calls[name]:
            if call.args and program.name_of(call.func).startswith("torch.optim."):
                yield call


def _trained(program: Program, optimizer: ast.Call) -> list[ast.expr]:
    """The modules whose parameters it gets.

    They are `model` and `head` of:

        Adam([*model.parameters(), *head.parameters()])
    """
    calls = [part for part in parts(program, optimizer.args[0]) if isinstance(part, ast.Call)]
    owners = [owner_of(call) for call in calls if is_method(call, "parameters", "named_parameters")]
    return [owner for owner in owners if owner is not None]


def _wrapped_names(program: Program) -> set[str]:
    """What is wrapped somewhere, as it is written."""
    models = [wrapped(call) for call in program.all_calls(*WRAPPERS)]
    return {dotted(model) for model in models if model is not None} - {""}


def _is_part_of_wrapped(program: Program, owner: ast.expr) -> bool:
    """`ddp_model.module.classifier`, where `ddp_model` is wrapped."""
    while isinstance(owner, ast.Attribute):
        owner = owner.value
        if program.made(owner, DDP):
            return True
    return False


def _is_bare(program: Program, owner: ast.expr) -> bool:
    """Whether it is known to be a module with parameters, and that nothing wraps it.

    For example:

        head = nn.Linear(512, 10)
    """
    values = program.values(owner)
    for value in values:
        if isinstance(value, CallResult):
            if not value.name.startswith("torch.nn.") or value.name in WRAPPERS:
                return False
        elif not isinstance(value, Instance) or not program.is_module(value.of):
            return False

    return bool(values) and not is_single_process(program, owner)


def _unprepared(program: Program, source: Source) -> Iterator[Finding]:
    """A model that is trained, and not prepared with its optimizer.

    For example:

        optimizer = Adam(model.parameters())
        optimizer, loader = accelerator.prepare(optimizer, loader)
        for batch in loader:
            accelerator.backward(model(batch))
    """
    prepares = list(program.calls(source, f"{ACCELERATOR}.prepare"))
    if len(prepares) != 1 or any_text_near(program, source, "prepare_model", "DeepSpeed"):
        return

    prepare = prepares[0]
    prepared = {dotted(value) for value in prepare.args}
    for optimizer in _optimizers(program, source):
        if not any(optimizer in parts(program, value) for value in prepare.args):
            continue

        models = {dotted(owner) for owner in _trained(program, optimizer)} - {""}
        loops = [
            loop for loop in batch_loops(program, source) if scope_of(loop) is scope_of(prepare)
        ]
        called = {dotted(call.func) for loop in loops for call in nodes_in(loop, ast.Call)}
        for name in sorted((models & called) - prepared):
            message = (
                f"accelerator.prepare gets the optimizer of {name}, and not {name}: "
                "nothing averages its gradients, and the replicas differ from the first step on"
            )
            fix = f"pass {name} to accelerator.prepare as well"
            yield RULE.at(source, prepare, message, fix=fix, severity=Severity.WARNING)
