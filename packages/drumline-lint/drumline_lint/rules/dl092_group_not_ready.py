"""DL092: a process group is used before it is joined, or after it was destroyed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import COLLECTIVES, DDP, DISTRIBUTED_SAMPLER, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    FunctionNode,
    ancestors,
    calls_beside,
    enclosing_function,
    is_after,
    nodes_in,
    scope_of,
)
from drumline_lint.reading.source import Source

RULE = rule("DL092")
_ASKS = ("torch.distributed.get_rank", "torch.distributed.get_world_size")
_DESTROYS = "torch.distributed.destroy_process_group"
# They join a group themselves.
_JOINING = ("torch.distributed.init_device_mesh",)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that need a group, in the function that joins or destroys it."""
    for joining in _joining_calls(program, source):
        if not _is_always(program, joining):
            continue
        for call in calls_beside(joining):
            use = _use(program, call) if is_after(joining, call) else None
            if use is not None and not _is_joined_before(program, call):
                where = source.where(joining)
                message = f"{source.code(call.func)} needs the process group, which is joined later ({where})"
                yield RULE.at(source, call, message)
    for destroying in program.calls(source, _DESTROYS):
        for call in calls_beside(destroying) if _is_always(program, destroying) else ():
            is_later = is_after(call, destroying) and call is not destroying
            is_again = any(
                is_after(each, destroying) and is_after(call, each) and _joins(program, each)
                for each in calls_beside(destroying)
            )
            if is_later and not is_again and _use(program, call) is not None:
                message = (
                    f"{source.code(call.func)} needs the process group, which was destroyed before"
                )
                fix = "destroy it at the very end"
                yield RULE.at(source, call, message, fix=fix)


def _joining_calls(program: Program, source: Source) -> list[ast.Call]:
    functions = [enclosing_function(init) for init in program.all_calls(INIT)]
    names = {function.name for function in functions if function is not None}
    calls = [call for name in names for call in program.index(source).calls.get(name, ())]
    calls += program.calls(source, INIT)
    return [call for call in calls if _joins(program, call)]


def _joins(program: Program, call: ast.Call) -> bool:
    """Itself, or in a function of the given files that joins in any case."""
    function = program.function_of(call)
    return program.name_of(call.func) == INIT or (
        function is not None and _is_joining(program, function)
    )


@cached_query
def _is_joining(program: Program, function: FunctionNode) -> bool:
    inner = nodes_in(function, ast.Call)
    return any(program.name_of(part.func) == INIT and _is_always(program, part) for part in inner)


def _is_always(program: Program, call: ast.Call) -> bool:
    """Whether its function makes the call whatever happens, and not in a loop."""
    kinds = (ast.For, ast.While, ast.Try, ast.Lambda)
    outer = [node for node in ancestors(call) if isinstance(node, kinds)]
    scope = scope_of(call)
    is_inside = any(scope in ancestors(node) for node in outer)
    return not is_inside and not any(conditions(program, call))


def _is_joined_before(program: Program, call: ast.Call) -> bool:
    return any(
        is_after(call, earlier) and _joins(program, earlier) for earlier in calls_beside(call)
    )


def _use(program: Program, call: ast.Call) -> ast.Call | None:
    """The call that needs a group: itself, or one that its function makes in any case."""
    if not _is_always(program, call):
        return None
    if _needs_group(program, call):
        return call
    function = program.function_of(call)
    inner = (
        []
        if function is None or enclosing_function(call) is function
        else nodes_in(function, ast.Call)
    )
    if function is not None and _is_joining(program, function):
        return None
    uses = [part for part in inner if _needs_group(program, part) and _is_always(program, part)]
    return uses[0] if uses else None


def _needs_group(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    if name == DISTRIBUTED_SAMPLER:
        is_told = (
            argument(call, 1, "num_replicas") is not None and argument(call, 2, "rank") is not None
        )
        return not is_told and not has_unknown_arguments(call)
    return name in (COLLECTIVES - {*_JOINING}) or name in (*_ASKS, DDP)
