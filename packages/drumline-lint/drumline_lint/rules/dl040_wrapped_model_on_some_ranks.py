"""DL040: only some ranks run a wrapped model, so its collectives block.

What blocks depends on the wrapper: FSDP gathers weights in each forward, DDP averages gradients in
each backward, and broadcasts buffers in the first forward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in, has_group, who_calls
from drumline_lint.flow.conditions import are_exclusive, is_for_debugging, rank_tests_at
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.flow.guards import guards
from drumline_lint.flow.loops import calls_made_in, has_gradients_off, is_backward
from drumline_lint.flow.some_ranks import calls_under_rank_tests, has_backward, is_within
from drumline_lint.program.calls import argument, number_of
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    calls_beside,
    enclosing_function,
    is_after,
    nodes_in,
    scope_of,
)
from drumline_lint.program.value import CallResult, ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS, wraps_any

RULE = rule("DL040")
_ALONE = "and the other ranks do not run it"
_EFFECTS = {
    "gather": f"its forward gathers the weights from all ranks, {_ALONE}",
    "average": f"its backward averages gradients over all ranks, {_ALONE}",
    "broadcast": (
        "its first forward broadcasts the buffers of rank 0, which the other ranks match with "
        "whatever collective they come to next"
    ),
}


@dataclass(frozen=True)
class _ModelRun:
    """A wrapped model that a call runs."""

    model: ast.expr
    """In the words of the caller: `model` of `evaluate(model)`."""
    call: ast.Call
    """The call of the model itself, perhaps in the function that gets it."""


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls under a condition on ranks that run a wrapped model, or give it to a function that
    does.

    if rank == 0:
        outputs = ddp_model(batch)
    """
    if not wraps_any(program) or framework(program, source):
        return

    reported = set()
    calls = program.index(source).every(ast.Call)
    for call, tests in calls_under_rank_tests(program, calls):
        run = _run_by(program, call)
        effect = "" if run is None else _effect(program, call, run)
        block = _block_of(call)
        if run is None or not effect or block in reported:
            continue

        reported.add(block)
        written = ast.unparse(run.model)
        message = (
            f"{who_calls(tests[0])} {source.code(call.func)}, which runs the wrapped {written}: "
            f"{_EFFECTS[effect]}"
        )
        fix = "let every rank run it, and keep only what is for one rank inside"
        if effect != "gather":
            fix = f"run `{written}.module` here, or let every rank run it"

        # most models have no buffers, and most broadcasts meet those of the next epoch
        is_sure = effect != "broadcast" and not is_for_debugging(program, call)
        is_shown = is_sure and is_of_ranks(program, source) and _is_certain(program, call, run)
        severity = None if is_shown else Severity.NOTE
        yield RULE.at(source, call, message, fix=fix, severity=severity)


def _is_certain(program: Program, call: ast.Call, run: _ModelRun) -> bool:
    """Whether the call shows the model, or the ranks that do not run it come to something else.

    For `log(trainer)`, which runs `trainer.model(batch)` somewhere, there has to be a collective.
    """
    if run.call is call or run.model in call.args:
        return True

    return _is_followed_by_collective(program, call)


def _block_of(call: ast.Call) -> ast.AST:
    """The outermost condition around it in its function; without one, the function.

    Calls in one block are one mistake, and are reported once.
    """
    block: ast.AST = enclosing_function(call) or scope_of(call)
    for outer in ancestors(call):
        if outer is block:
            break
        if isinstance(outer, ast.If):
            return outer

    return block


# The model that a call runs.


def _run_by(program: Program, call: ast.Call) -> _ModelRun | None:
    """The wrapped model that a call runs, itself or in the function that gets it.

    Examples: `model(batch)`, and `evaluate(model)` where `def evaluate(net)` calls `net(batch)`.
    """
    model = _called(call)
    if _wrappings(program, model):
        return _ModelRun(model, call)

    function = program.function_of(call)
    if not isinstance(function, ast.FunctionDef):
        return None

    for inner in nodes_in(function, ast.Call):
        if any(rank_tests_at(program, inner)):
            continue

        for model in _models_called(program, call, function, inner):
            if _wrappings(program, model):
                return _ModelRun(model, inner)

    return None


def _models_called(
    program: Program, call: ast.Call, function: ast.FunctionDef, inner: ast.Call
) -> Iterator[ast.expr]:
    """What a call in a function may run: `self.model`, or what the caller gives for `net`.

    def evaluate(net, batch):
        return net(batch)  # `model` of `evaluate(model, batch)`
    """
    model = _called(inner)
    if isinstance(model, ast.Attribute):
        yield model

    for binding in program.bindings(model) if isinstance(model, ast.Name) else ():
        parameter = binding.node
        if isinstance(parameter, ast.arg):
            value = argument(call, number_of(function, parameter), parameter.arg)
            if value is not None:
                yield value


def _called(call: ast.Call) -> ast.expr:
    """The model of a call: `model` of `model(x)` and `model.generate(x)`."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in ("forward", "generate"):
        return function.value
    return function


def _wrappings(program: Program, model: ast.expr) -> list[CallResult]:
    """What wraps it; nothing where something else is assigned to the name as well.

    if distributed:
        model = DDP(model)
    """
    if isinstance(model, ast.Attribute) and model.attr == "module":
        return []

    made = program.made(model, *WRAPPERS)
    calls = [value.call for value in made]
    for origin in written_values(program, model):
        if origin not in calls and not _is_inner(origin):
            return []
    return made


def _is_inner(origin: ast.expr) -> bool:
    """Whether it is the inner model of a run with one process, or `torch.compile` of the wrapped
    one.

    `model = Net()` is, before `model = DDP(model)`; `model = unwrap(model)` and `deepcopy(model)`
    have no collectives.
    """
    if isinstance(origin, ast.Attribute):
        return origin.attr != "module"

    name = called_name(origin) if isinstance(origin, ast.Call) else ""
    return name not in ("getattr", "deepcopy", "copy") and "unwrap" not in name


# What the model then does.


def _effect(program: Program, call: ast.Call, run: _ModelRun) -> str:
    """What the model does together with the ranks that do not come; empty if nothing.

    Nothing is known of a group of some ranks, of a model that only these ranks wrap, and of one
    that the other ranks run elsewhere.
    """
    made = _wrappings(program, run.model)
    for wrapping in (value.call for value in made):
        if has_group(program, wrapping) or guards(program, wrapping):
            return ""
        if scope_of(wrapping) is scope_of(call) and wrapping.lineno > call.lineno:
            return ""  # it is wrapped later
    if is_within(call, "join") or _runs_elsewhere(program, call, run.model):
        return ""

    if any(value.name != DDP for value in made):
        return "gather"

    is_off = has_gradients_off(program, run.call) or has_gradients_off(program, call)
    if not is_off and has_backward(program, _block_of(call)):
        return "average"

    return "broadcast" if all(_sends_buffers(program, value.call) for value in made) else ""


def _sends_buffers(program: Program, wrapping: ast.Call) -> bool:
    """Whether it may broadcast buffers: not `DDP(model, broadcast_buffers=False)`."""
    option = argument(wrapping, 4, "broadcast_buffers")
    return option is None or program.values(option) == {ConstantValue(True)}


def _is_followed_by_collective(program: Program, call: ast.Call) -> bool:
    """Whether all ranks come to a collective after it, in a loop around it that trains.

    for batch in loader:
        if rank == 0:
            preview(model)
        dist.all_reduce(loss_of(model(batch)))
    """
    for loop in ancestors(call):
        if not isinstance(loop, ast.For | ast.While):
            continue
        if not any(map(is_backward, calls_made_in(program, loop))):
            continue

        following = [later for later in nodes_in(loop, ast.Call) if is_after(later, call)]
        if any(any(collectives_in(program, later)) for later in following):
            return True

    return False


# Where the other ranks run it.


def _runs_elsewhere(program: Program, call: ast.Call, model: ast.expr) -> bool:
    """Whether the function runs it under another condition on ranks, or on all without gradients.

    DDP sends no buffers after a pass without gradients until it trains again.
    """
    written = ast.unparse(model)
    for nearby in calls_beside(call):
        if nearby is call:
            continue
        if is_after(call, nearby) and _evaluates(program, nearby, written):
            return True
        if ast.unparse(_called(nearby)) == written and _matches(program, call, nearby):
            return True

    return False


def _matches(program: Program, call: ast.Call, model_pass: ast.Call) -> bool:
    """Whether the other ranks run the model in this pass, or it leaves no buffers to send.

    if rank == 0:
        loss = model(batch)
    else:
        model(batch)
    """
    if is_after(call, model_pass) and has_gradients_off(program, model_pass):
        return True

    is_for_some = any(rank_tests_at(program, model_pass))
    if is_for_some and _block_of(model_pass) is not _block_of(call):
        return True

    return are_exclusive(program, call, model_pass)


def _evaluates(program: Program, call: ast.Call, written: str) -> bool:
    """Whether it is a function that every rank lets run the model without gradients.

    validate(model)  # with torch.no_grad() in it
    if rank == 0:
        model(sample)
    """
    run = _run_by(program, call)
    if run is None or run.call is call or ast.unparse(run.model) != written:
        return False

    return has_gradients_off(program, run.call) and not any(rank_tests_at(program, call))
