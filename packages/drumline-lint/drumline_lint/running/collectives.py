"""Calls that every rank must make: those who do wait for those who do not."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.program.names import COLLECTIVE_SAVES, COLLECTIVES, FSDP
from drumline_lint.program.origins import written
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    FunctionNode,
    ScopeNode,
    class_around,
    function_around,
    inside,
    last_name,
    scope_node,
)
from drumline_lint.program.value import Known, Library, Made

DEEPEST = 20
# It tells which rank is missing; whoever uses it knows what a barrier is.
_LEFT_OUT = {"torch.distributed.monitored_barrier"}
_OF_FRAMEWORKS = {
    f"accelerate.Accelerator.{name}"
    for name in (
        "wait_for_everyone",
        "gather",
        "gather_for_metrics",
        "reduce",
        "save_state",
        "get_state_dict",
    )
}
_OF_SHARDS = "torch.distributed.checkpoint.state_dict."
ALL = (COLLECTIVES | COLLECTIVE_SAVES | _OF_FRAMEWORKS) - _LEFT_OUT
_LASTS = frozenset(name.rpartition(".")[2] for name in ALL)


def collective(program: Program, call: ast.Call) -> str:
    """The name of the collective that a call is; empty if it is none, or one of some ranks' group only."""
    name = program.name_of(call.func)
    if name not in ALL or has_group(program, call):
        return ""
    return "" if name.startswith(_OF_SHARDS) and not _has_shards(program) else name


def _has_shards(program: Program) -> bool:
    """Whether a model is spread over ranks; of one that is whole everywhere, each can tell the state by itself."""
    names = (*FSDP, "torch.distributed.tensor.parallel.parallelize_module")
    return program.remember("has shards", lambda: next(program.all_calls(*names), None) is not None)


def has_group(program: Program, call: ast.Call) -> bool:
    """Whether it is told who takes part: `group=`, or a group that was made."""
    said = [
        one.value for one in call.keywords if one.arg is None or "group" in one.arg or one.arg == "no_dist"
    ]
    given = any(not _is_world(program, value) for value in said)
    return given or any(_is_group(program, one) for one in call.args)


def _is_world(program: Program, value: ast.expr) -> bool:
    values = program.values(value)
    if values == {Known(None)}:  # or None at first, and later something that is not known
        return all(isinstance(one, ast.Constant) for one in written(program, value))
    return values in (
        frozenset({Library("torch.distributed.GroupMember.WORLD")}),
        frozenset({Library("torch.distributed.group.WORLD")}),
    )


def _is_group(program: Program, value: ast.expr) -> bool:
    if _is_world(program, value):
        return False
    made = any(isinstance(one, Made) and "new_" in one.name for one in program.values(value))
    name = last_name(value).lower()
    return made or name.endswith("group") or not {"group", "pg", "mesh"}.isdisjoint(name.split("_"))


def collectives_in(program: Program, node: ast.AST) -> Iterator[tuple[str, tuple[ast.Call, ...]]]:
    """All that are called in it, with the calls that lead there: the last is the collective itself."""
    likely = likely_names(program)
    for call in inside(node, ast.Call):
        if last_name(call.func) not in likely:
            continue
        if name := collective(program, call):
            yield name, (call,)
        elif not has_group(program, call):
            function = program.function_of(call)
            if function is not None:
                for inner, chain in collectives_of(program, function):
                    yield inner, (call, *chain)


def likely_names(program: Program) -> set[str]:
    """What a call that comes to a collective may be named: by names alone, so that few calls need a closer look."""
    return program.remember("likely collectives", lambda: _find_likely(program))


def _find_likely(program: Program) -> set[str]:
    likely = set(_LASTS)
    callers: dict[str, set[str]] = defaultdict(set)
    for source in program.sources:
        index = program.index(source)
        for scope in index.scopes.values():
            for name, bindings in scope.names.items():
                for binding in bindings:
                    if binding.imported:
                        callers[binding.imported.rpartition(".")[2]].add(name)
        for called, calls in index.calls.items():
            callers[called].update(map(_name_around, {scope_node(call) for call in calls}))
    pending = list(likely)
    while pending:
        new = callers[pending.pop()] - likely - {""}
        likely |= new
        pending += new
    return likely


def _name_around(scope: ScopeNode) -> str:
    """Of the function that calls there are in, or of the class that is made by it."""
    function = scope if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else function_around(scope)
    if function is None:
        return ""
    owner = class_around(function) if function.name == "__init__" else None
    return function.name if owner is None else owner.name


def collectives_of(program: Program, function: FunctionNode) -> tuple[tuple[str, tuple[ast.Call, ...]], ...]:
    """Those that a function calls, the first of each name."""
    nothing: tuple[tuple[str, tuple[ast.Call, ...]], ...] = ()
    return program.once("collectives", function, lambda: _first_of_each(program, function), nothing, DEEPEST)


def _first_of_each(program: Program, function: FunctionNode) -> tuple[tuple[str, tuple[ast.Call, ...]], ...]:
    found: dict[str, tuple[ast.Call, ...]] = {}
    for name, chain in collectives_in(program, function):
        found.setdefault(name, chain)
    return tuple(found.items())


def short(name: str) -> str:
    """`barrier` of `torch.distributed.barrier`."""
    return name.rpartition(".")[2]
