"""DL059: training calls the model inside DDP, not DDP.

DDP averages gradients only of what its own forward computes. A call of `model.module`, or of the
model by its earlier name, trains each replica by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import held_conditions
from drumline_lint.flow.loops import calls_made_in, has_gradients_off
from drumline_lint.program.calls import argument, number_of
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    Loop,
    called_name,
    calls_beside,
    dotted,
    enclosing,
    nodes_in,
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
    """Calls that pass DDP by, in a loop that trains, and methods that it does not have.

    for batch in loader:
        ddp_model.module(batch).sum().backward()
    """
    if next(program.all_calls(DDP), None) is None:
        return

    lost = [call for call in program.calls(source, DDP) if _is_lost(call)]
    for call in lost:
        model = source.code(call.args[0])
        message = f"the result of {source.code(call.func)} is lost: {model} trains without it"
        yield RULE.at(source, call, message, fix=f"write {model} = {source.code(call)}")

    yield from _missing_methods(program, source)

    scopes = [scope_of(call) for call in lost]
    for loop in training_loops(program):
        synchronized = wrapped_calls(program, loop)
        bypass = _first_bypass(program, source, loop, synchronized)
        if bypass is None or scope_of(bypass) in scopes:
            continue

        message = (
            f"{source.code(bypass.func)} is the model inside DDP: "
            "the gradients of this call are not averaged over ranks"
        )
        severity = Severity.WARNING if synchronized else None
        yield RULE.at(source, bypass, message, severity=severity)


def _is_lost(call: ast.Call) -> bool:
    """Whether DDP's result is thrown away: `DDP(model)` as a statement.

    In a test, or within `try`, no more than its exception may be wanted.
    """
    if not isinstance(parent_of(call), ast.Expr) or not call.args:
        return False

    return enclosing(call, ast.Try, ast.With) is None


# Methods that DDP does not have.


def _missing_methods(program: Program, source: Source) -> Iterator[Finding]:
    """Methods of a wrapped model that only the model inside DDP has.

    model = DDP(Encoder())
    model.encode(x)  # AttributeError: Encoder has `encode`, DDP has not
    """
    calls = program.index(source).calls
    names = (_names_of_methods(program) - _OF_MODULES) & calls.keys()
    for name in names:
        for call in calls[name]:
            model = owner_of(call)
            if model is None or not _is_missing(program, model, name):
                continue

            message = (
                f"{source.code(model)} is wrapped in DDP, which has no method {name}: "
                "this raises an AttributeError"
            )
            fix = f"call it in forward, or as `{source.code(model)}.module.{name}`"
            yield RULE.at(source, call, message, fix=fix)


def _is_missing(program: Program, model: ast.expr, name: str) -> bool:
    """Whether a model is surely wrapped, and what is wrapped has a method of this name."""
    made = program.made(model, DDP)
    if not made or len(made) < len(program.values(model)) or _is_not_wrapped(program, model):
        return False

    classes = _classes_inside(program, [value.call for value in made])
    return bool(classes) and all(program.method(class_, name) is not None for class_ in classes)


def _is_not_wrapped(program: Program, model: ast.expr) -> bool:
    """Whether a condition says that the model has no wrapper here.

    if hasattr(model, "module"):
        model.module.encode(x)
    else:
        model.encode(x)
    """
    for test, holds in held_conditions(program, model):
        if holds or not isinstance(test, ast.Call) or not test.args:
            continue

        is_question = called_name(test) in ("hasattr", "isinstance")
        if is_question and dotted(test.args[0]) == dotted(model):
            return True

    return False


@cached_query
def _names_of_methods(program: Program) -> set[str]:
    """The methods of the models that are wrapped, where their classes are given.

    Only calls of these names have to be looked at.
    """
    names = set()
    for class_ in _classes_inside(program, program.all_calls(DDP)):
        for base in program.ancestry(class_):
            if not isinstance(base, str):
                names |= {part.name for part in base.body if isinstance(part, ast.FunctionDef)}

    return names


def _classes_inside(program: Program, wrappings: Iterable[ast.Call]) -> list[ast.ClassDef]:
    """The classes of the models that are wrapped: `Net` of `DDP(Net())`."""
    values = [value for call in wrappings for value in program.values(wrapped(call))]
    return [value.of for value in values if isinstance(value, Instance)]


# Calls of the model inside DDP.


def _first_bypass(
    program: Program, source: Source, loop: Loop, synchronized: list[ast.Call]
) -> ast.Call | None:
    """The first call in a loop that runs the model without DDP.

    Where calls of DDP are beside it, only one that they do not make up for.
    """
    for call in calls_made_in(program, loop):
        if program.source_of(call) is not source or not _bypasses(program, call):
            continue
        if not synchronized or _is_of_other(program, call, synchronized):
            return call

    return None


def _bypasses(program: Program, call: ast.Call) -> bool:
    """Whether it runs the model inside DDP, with gradients.

    Examples: `ddp.module(x)`, `ddp.module.loss(x)` before a backward, and `net(x)` after
    `ddp = DDP(net)`.
    """
    if has_gradients_off(program, call):
        return False

    model = call.func
    if isinstance(model, ast.Attribute) and model.attr == "forward":
        model = model.value
    if isinstance(model, ast.Attribute) and model.attr == "module":
        return bool(program.made(model.value, DDP))

    module = model.value if isinstance(model, ast.Attribute) else None
    if isinstance(module, ast.Attribute) and module.attr == "module":
        return bool(program.made(module.value, DDP)) and _goes_backward(program, call)
    if any(program.made(wrapper, DDP) for wrapper in _unwrapped(program, module or model)):
        return _goes_backward(program, call)

    return any(is_wrapped_by(program, model, wrapping) for wrapping in program.all_calls(DDP))


def _unwrapped(program: Program, model: ast.expr) -> Iterator[ast.expr]:
    """What a name was taken out of, by `.module` or by a function that returns it.

    It is `ddp`, twice:

        net = ddp.module
        net = bare(ddp)  # return model.module if hasattr(model, "module") else model
    """
    for origin in written_values(program, model) if isinstance(model, ast.Name) else ():
        if isinstance(origin, ast.Attribute) and origin.attr == "module":
            yield origin.value

        function = program.function_of(origin) if isinstance(origin, ast.Call) else None
        if not isinstance(origin, ast.Call) or not isinstance(function, ast.FunctionDef):
            continue

        parameters = {parameter.arg: parameter for parameter in function.args.args}
        for part in nodes_in(function, ast.Attribute):
            parameter = parameters.get(dotted(part.value)) if part.attr == "module" else None
            is_returned = enclosing(part, ast.Return, ast.Assign) is not None
            if parameter is None or not is_returned or isinstance(parent_of(part), ast.Attribute):
                continue

            wrapper = argument(origin, number_of(function, parameter), parameter.arg)
            if wrapper is not None:
                yield wrapper


def _is_of_other(program: Program, call: ast.Call, synchronized: list[ast.Call]) -> bool:
    """Whether it is a part of the loss, and of a model that DDP is never called for.

    score = discriminator(generator.module(noise))  # the generator bypasses DDP
    """
    module = call.func
    if not isinstance(module, ast.Attribute) or module.attr != "module":
        return False

    training = [nearby for nearby in synchronized if not has_gradients_off(program, nearby)]
    model = dotted(module.value)
    if not model or model in {dotted(nearby.func) for nearby in training}:
        return False
    if any(scope_of(nearby) is not scope_of(call) for nearby in synchronized):
        return False

    return _goes_backward(program, call)


def _goes_backward(program: Program, call: ast.Call) -> bool:
    """Whether the result is a loss, or a part of one, that a backward pass starts from.

    loss = model.module.loss(x)
    loss.backward()
    """
    passes = [nearby for nearby in calls_beside(call) if is_method(nearby, "backward")]
    return any(call in parts(program, owner_of(backward)) for backward in passes)
