"""DL059: training calls the model inside DDP, not DDP."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import held_conditions
from drumline_lint.flow.loops import calls_made_in, has_gradients_off
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    calls_beside,
    dotted,
    last_name,
    owner_of,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_wrapped_by, wrapped
from drumline_lint.training.steps import is_method, training_loops, wrapped_calls

RULE = rule("DL059", in_tests=False)
# What DDP has as well.
_OF_MODULES = set(
    "forward train eval state_dict load_state_dict parameters named_parameters modules named_modules "
    "children buffers to cuda cpu half float double bfloat16 zero_grad apply no_sync join compile "
    "requires_grad_ share_memory register_forward_hook register_comm_hook".split()
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`model.module(x)`, or the model by the name it had before, in a loop that trains."""
    lost = [call for call in program.calls(source, DDP) if _is_lost(call)]
    for call in lost:
        model = source.code(call.args[0])
        message = f"the result of {source.code(call.func)} is lost: {model} trains without it"
        yield RULE.at(source, call, message, fix=f"write {model} = {source.code(call)}")
    yield from _missing_methods(program, source)
    scopes = [scope_of(call) for call in lost]
    loops = training_loops(program) if next(program.all_calls(DDP), None) else []
    for loop in loops:
        calls = [call for call in calls_made_in(program, loop) if program.source_of(call) is source]
        bypassing = [call for call in calls if _bypasses(program, call)]
        synchronized = wrapped_calls(program, loop)
        severity = Severity.WARNING if synchronized else None
        if synchronized:
            bypassing = [call for call in bypassing if _is_of_other(program, call, synchronized)]
        for call in bypassing[:1]:
            if scope_of(call) not in scopes:
                message = (
                    f"{source.code(call.func)} is the model inside DDP: "
                    "the gradients of this call are not averaged over ranks"
                )
                yield RULE.at(source, call, message, severity=severity)


def _missing_methods(program: Program, source: Source) -> Iterator[Finding]:
    """`model.encode(x)`, where only the model inside DDP has it."""
    index = program.index(source)
    names = _names_of_methods(program) - _OF_MODULES
    for call in (call for name in names & index.calls.keys() for call in index.calls[name]):
        owner = owner_of(call)
        name = called_name(call)
        made = program.made(owner, DDP)
        if not made or owner is None or len(made) < len(program.values(owner)):
            continue
        if _is_not_wrapped(program, owner):
            continue
        models = [value for wrapping in made for value in program.values(wrapped(wrapping.call))]
        classes = [model.of for model in models if isinstance(model, Instance)]
        if classes and all(program.method(class_, name) is not None for class_ in classes):
            message = (
                f"{source.code(owner)} is wrapped in DDP, which has no method {name}: "
                "this raises an AttributeError"
            )
            fix = f"call it in forward, or as `{source.code(owner)}.module.{name}`"
            yield RULE.at(source, call, message, fix=fix)


def _is_not_wrapped(program: Program, model: ast.expr) -> bool:
    """Where `hasattr(model, "module")` or `isinstance(model, DDP)` does not hold."""
    return any(
        called_name(test) in ("hasattr", "isinstance") and dotted(test.args[0]) == dotted(model)
        for test, holds in held_conditions(program, model)
        if isinstance(test, ast.Call) and test.args and not holds
    )


@cached_query
def _names_of_methods(program: Program) -> set[str]:
    """Of the models that are wrapped, where their classes are given."""
    models = [wrapped(call) for call in program.all_calls(DDP)]
    values = [value for model in models for value in program.values(model)]
    classes = [value.of for value in values if isinstance(value, Instance)]
    bases = [base for class_ in classes for base in program.ancestry(class_)]
    return {
        part.name
        for base in bases
        if not isinstance(base, str)
        for part in base.body
        if isinstance(part, ast.FunctionDef)
    }


def _is_lost(call: ast.Call) -> bool:
    """`DDP(model)` as a statement; a test may want no more than its exception."""
    is_tried = any(isinstance(outer, ast.Try | ast.With) for outer in ancestors(call))
    return isinstance(parent_of(call), ast.Expr) and bool(call.args) and not is_tried


def _bypasses(program: Program, call: ast.Call) -> bool:
    if has_gradients_off(program, call):
        return False
    inner = call.func
    if isinstance(inner, ast.Attribute) and inner.attr == "forward":
        inner = inner.value
    if isinstance(inner, ast.Attribute) and inner.attr == "module":
        return bool(program.made(inner.value, DDP))
    if isinstance(inner, ast.Attribute) and last_name(inner.value) == "module":
        module = inner.value
        is_inside = isinstance(module, ast.Attribute) and program.made(module.value, DDP)
        return bool(is_inside) and _goes_backward(program, call)
    return any(is_wrapped_by(program, inner, wrapping) for wrapping in program.all_calls(DDP))


def _is_of_other(program: Program, call: ast.Call, synchronized: list[ast.Call]) -> bool:
    """Whether it is a part of the loss, and of a model that DDP is never called for: the generator,
    where only the discriminator is called wrapped."""
    inner = call.func
    is_inside = isinstance(inner, ast.Attribute) and inner.attr == "module"
    model = dotted(inner.value) if isinstance(inner, ast.Attribute) else ""
    models = {
        dotted(nearby.func) for nearby in synchronized if not has_gradients_off(program, nearby)
    }
    is_same_scope = all(scope_of(nearby) is scope_of(call) for nearby in synchronized)
    return (
        is_inside
        and bool(model)
        and model not in models
        and is_same_scope
        and _goes_backward(program, call)
    )


def _goes_backward(program: Program, call: ast.Call) -> bool:
    """`loss = model.module.loss(x)`, then `loss.backward()`."""
    passes = [nearby for nearby in calls_beside(call) if is_method(nearby, "backward")]
    owners = [
        backward.func.value for backward in passes if isinstance(backward.func, ast.Attribute)
    ]
    return any(call in parts(program, loss) for loss in owners)
