"""DL040: only some ranks run a wrapped model, so its collectives block."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls under a condition on ranks that run a wrapped model, or give it to a function that
    does."""
    if not wraps_any(program) or framework(program, source):
        return
    reported = set()
    calls = program.index(source).every(ast.Call)
    for call, tests in calls_under_rank_tests(program, calls):
        model, running = _run_by(program, call)
        if model is None or running is None:
            continue
        effect = _effect(program, model, call, running)
        if effect and (block := _block_of(call)) not in reported:
            reported.add(block)
            written = ast.unparse(model)
            message = (
                f"{who_calls(tests[0])} {source.code(call.func)}, which runs the wrapped {written}: "
                f"{_EFFECTS[effect]}"
            )
            fix = "let every rank run it, and keep only what is for one rank inside"
            if effect != "gather":
                fix = f"run `{written}.module` here, or let every rank run it"
            following = _following_collectives(program, call)
            # most models have no buffers, and most broadcasts meet those of the next epoch
            is_sure = effect != "broadcast" and not is_for_debugging(program, call)
            is_seen = running is call or model in call.args or bool(following)
            is_shown = is_sure and is_seen and is_of_ranks(program, source)
            severity = None if is_shown else Severity.NOTE
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _run_by(program: Program, call: ast.Call) -> tuple[ast.expr | None, ast.Call | None]:
    """The wrapped model that a call runs, itself or in the function that gets it; and the call
    there."""
    model = _called(call)
    if _wrappings(program, model):
        return model, call
    function = program.function_of(call)
    if not isinstance(function, ast.FunctionDef):
        return None, None
    for running in nodes_in(function, ast.Call):
        inner = _called(running)
        if any(rank_tests_at(program, running)):
            continue
        for binding in program.bindings(inner) if isinstance(inner, ast.Name) else ():
            parameter = binding.node
            if isinstance(parameter, ast.arg):
                value = argument(call, number_of(function, parameter), parameter.arg)
                if value is not None and _wrappings(program, value):
                    return value, running
        if isinstance(inner, ast.Attribute) and _wrappings(program, inner):
            return inner, running
    return None, None


def _called(call: ast.Call) -> ast.expr:
    """`model` of `model(x)` and `model.generate(x)`."""
    called = call.func
    is_method = isinstance(called, ast.Attribute) and called.attr in ("forward", "generate")
    return called.value if isinstance(called, ast.Attribute) and is_method else called


def _wrappings(program: Program, model: ast.expr) -> list[CallResult]:
    """What wraps it; nothing where something else is assigned to the name as well."""
    if isinstance(model, ast.Attribute) and model.attr == "module":
        return []
    made = program.made(model, *WRAPPERS)
    calls = [value.call for value in made]
    origins = written_values(program, model)
    is_certain = all(origin in calls or _is_argument(origin) for origin in origins)
    return made if is_certain else []


def _is_argument(origin: ast.expr) -> bool:
    """The inner model of a run with one process, or `torch.compile` of the wrapped one."""
    name = called_name(origin) if isinstance(origin, ast.Call) else ""
    is_bare = isinstance(origin, ast.Attribute) and origin.attr == "module"
    return not is_bare and name not in ("getattr", "deepcopy", "copy") and "unwrap" not in name


def _effect(program: Program, model: ast.expr, call: ast.Call, running: ast.Call) -> str:
    """What the model does together with the ranks that do not come; empty if nothing, or if they
    run it elsewhere."""
    made = _wrappings(program, model)
    if any(has_group(program, value.call) or guards(program, value.call) for value in made):
        return ""
    if any(
        scope_of(value.call) is scope_of(call) and value.call.lineno > call.lineno for value in made
    ):
        return ""  # it is wrapped later
    if is_within(call, "join") or _runs_elsewhere(program, call, model):
        return ""
    if any(value.name != DDP for value in made):
        return "gather"
    if has_backward(program, _block_of(call)) and not (
        has_gradients_off(program, running) or has_gradients_off(program, call)
    ):
        return "average"
    return "broadcast" if all(_sends_buffers(program, value.call) for value in made) else ""


def _block_of(call: ast.Call) -> ast.AST:
    """The outermost condition around it in its function."""
    block: ast.AST = enclosing_function(call) or scope_of(call)
    for outer in ancestors(call):
        if outer is block:
            break
        if isinstance(outer, ast.If):
            return outer
    return block


def _runs_elsewhere(program: Program, call: ast.Call, model: ast.expr) -> bool:
    """Whether the function runs it under another condition on ranks, or on all without gradients:
    DDP sends no buffers after that until it trains again."""
    written = ast.unparse(model)
    nearby = [each for each in calls_beside(call) if each is not call]
    passes = [each for each in nearby if ast.unparse(_called(each)) == written]
    evaluations = [each for each in nearby if _evaluates(program, each, written)]
    return any(is_after(call, evaluation) for evaluation in evaluations) or any(
        (any(rank_tests_at(program, model_pass)) and _block_of(model_pass) is not _block_of(call))
        or (has_gradients_off(program, model_pass) and is_after(call, model_pass))
        or are_exclusive(program, call, model_pass)
        for model_pass in passes
    )


def _evaluates(program: Program, call: ast.Call, written: str) -> bool:
    """Whether it is a function that every rank lets run the model without gradients."""
    model, running = _run_by(program, call)
    is_given = model is not None and running is not call and ast.unparse(model) == written
    is_for_all = is_given and not any(rank_tests_at(program, call))
    return is_for_all and running is not None and has_gradients_off(program, running)


def _following_collectives(program: Program, call: ast.Call) -> list[ast.Call]:
    """What all ranks come to after it in the loops around it that train."""
    loops = [outer for outer in ancestors(call) if isinstance(outer, ast.For | ast.While)]
    return [
        each
        for loop in loops
        if any(map(is_backward, calls_made_in(program, loop)))
        for each in nodes_in(loop, ast.Call)
        if is_after(each, call) and any(collectives_in(program, each))
    ]


def _sends_buffers(program: Program, wrapping: ast.Call) -> bool:
    option = argument(wrapping, 4, "broadcast_buffers")
    return option is None or program.values(option) == {ConstantValue(True)}
