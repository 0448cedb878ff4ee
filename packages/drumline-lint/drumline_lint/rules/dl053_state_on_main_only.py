"""DL053: only rank 0 updates or restores what every rank has a copy of."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.conditions import rank_tests_at, rest_of_block
from drumline_lint.flow.guards import is_main_only
from drumline_lint.flow.some_ranks import has_backward
from drumline_lint.program.calls import argument
from drumline_lint.program.names import ACCELERATOR, FABRIC, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ancestors,
    dotted,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_wrapped_model, wraps_any
from drumline_lint.training.steps import is_optimizer, is_scaler

RULE = rule("DL053")
_OF_MODELS = {"ema", "model", "net", "module", "unet", "teacher"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Steps and restored states under a condition that holds on rank 0 only."""
    of_frameworks = program.calls(source, ACCELERATOR, FABRIC)
    trains = "backward" in source.text and next(iter(of_frameworks), None) is not None
    if not trains and not wraps_any(program):
        return
    calls = program.index(source).calls
    names = (
        "step",
        "load_state_dict",
        *(name for name in calls if "ema" in name or name == "update"),
    )
    for call in (call for name in names for call in calls.get(name, ())):
        what = _changed(program, call)
        if what and _is_on_main_only(program, call) and not _is_sent_later(program, call):
            message = f"only rank 0 {what}: the replicas differ from here on"
            yield RULE.at(source, call, message)


def _is_on_main_only(program: Program, call: ast.Call) -> bool:
    """Also on the first rank of each node."""
    tests = frozenset(rank_tests_at(program, call))
    return is_main_only(tests) or any(
        test.kind == "local" and test.is_main and test.is_needed for test in tests
    )


def _changed(program: Program, call: ast.Call) -> str:
    """What a call changes that DDP does not copy from rank 0; empty if nothing."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if owner is None:
        is_average = "ema" in last_name(call.func).lower().split("_")
        is_run = is_average and _runs_average(program, call)
        return "updates the average of the weights" if is_run else ""
    name = dotted(owner)
    is_state = is_optimizer(program, owner) or is_scaler(program, owner)
    if "ema" in f"{name}.{last_name(call.func)}".lower().replace(".", "_").split("_"):
        return "updates the average of the weights" if _runs_average(program, call) else ""
    is_schedule = "sched" in name.lower()
    if last_name(call.func) == "step":
        return f"calls {name}.step()" if is_state or is_schedule else ""
    if is_state or is_schedule:
        return f"restores {name}"
    if last_name(call.func) == "load_state_dict" and program.made(owner, *FSDP):
        return f"restores the sharded {name}"
    is_late = is_wrapped_model(program, owner) and _is_trained_later(program, call)
    is_late = is_late or _is_sharded_later(program, call, name)
    return f"restores {name}" if is_late else ""


def _runs_average(program: Program, update: ast.Call) -> bool:
    """Whether every rank runs the averaged model."""
    calls = program.index(program.source_of(update)).every(ast.Call)
    return any(
        any(_is_average(name) for name in _run_by(call)) and not any(rank_tests_at(program, call))
        for call in calls
    )


def _run_by(call: ast.Call) -> list[ast.expr]:
    """What a call runs: itself, or what it evaluates."""
    name = last_name(call.func).lower()
    return [call.func, *(call.args if name.startswith(("eval", "valid", "test")) else ())]


def _is_average(model: ast.expr) -> bool:
    words = set(last_name(model).lower().split("_"))
    return "ema" in words and words <= _OF_MODELS


def _is_trained_later(program: Program, call: ast.Call) -> bool:
    """In the same function; where that is over, rank 0 may evaluate what it has restored."""
    function = enclosing_function(call) or program.source_of(call).tree
    return any(
        position(inner) > position(call)
        for inner in nodes_in(function, ast.Call)
        if has_backward(program, [inner])
    )


def _is_sharded_later(program: Program, call: ast.Call, model: str) -> bool:
    """Whether FSDP takes every rank's own weights: without `sync_module_states`."""
    return any(
        program.name_of(candidate.func) == FSDP[0]
        and bool(candidate.args)
        and dotted(candidate.args[0]) == model
        and argument(candidate, None, "sync_module_states") is None
        for candidate in nodes_in(scope_of(call), ast.Call)
        if position(candidate) > position(call)
    )


def _is_sent_later(program: Program, call: ast.Call) -> bool:
    """Whether the rest of the function sends something to the other ranks."""
    sending = ("broadcast", "broadcast_object_list", "scatter", "all_gather_object")
    inner: ast.AST = call
    for outer in ancestors(call):
        rest = rest_of_block(inner) if isinstance(inner, ast.stmt) else []
        for node in rest:
            names = [name.rpartition(".")[2] for name, _ in collectives_in(program, node)]
            if not set(names).isdisjoint(sending):
                return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        inner = outer
    return False
