"""DL049: the result of a collective is used on ranks that do not get it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rank_tests_at
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.calls import argument
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ScopeNode,
    ancestors,
    called_name,
    calls_beside,
    dotted,
    enclosing_function,
    is_after,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL049")
DEEPEST = 3
_MEAN = re.compile(r"(^|_)(mean|avg|average|averaged)(_|$)")
_DIVIDES = re.compile(r"/|div|mean\(|world|num_replicas|size\(\)|nprocs")
_POINT_TO_POINT = ("torch.distributed.isend", "torch.distributed.irecv")
_KEEPING = ("item", "float", "cpu", "detach", "mean", "sum", "get_world_size")
_SENDING = ("broadcast", "all_reduce", "broadcast_object_list")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`dist.reduce(loss, 0)`, by whose result every rank steps a scheduler or leaves a loop."""
    for call in program.calls(source, "torch.distributed.reduce"):
        tensor = dotted(call.args[0]) if call.args else ""
        if not tensor or any(rank_tests_at(program, call)) or _is_sent(call):
            continue
        for holder in _holders(program, call, tensor):
            if use := _decision(program, holder):
                line = program.source_of(use).place(use).line
                message = (
                    f"only one rank gets the result of {source.code(call.func)}, "
                    f"and every rank decides by it in line {line}"
                )
                yield RULE.at(source, call, message)
                break
    for call in program.calls(source, "torch.distributed.all_reduce"):
        yield from _sum_for_mean(program, source, call)
    for call in program.calls(source, *COLLECTIVES, *_POINT_TO_POINT):
        if _is_left_running(program, call):
            message = (
                f"{source.code(call.func)} returns at once, and nothing waits until it is done"
            )
            fix = "keep what it returns, and call wait() before the tensor is used"
            yield RULE.at(source, call, message, fix=fix)


def _is_left_running(program: Program, call: ast.Call) -> bool:
    """Whether it is asynchronous, and what it returns is thrown away or never used."""
    is_async = program.values(argument(call, None, "async_op")) == {ConstantValue(True)}
    if not is_async and program.name_of(call.func) not in _POINT_TO_POINT:
        return False
    statement = parent_of(call)
    if isinstance(statement, ast.Expr):
        return True
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return False
    names: list[ast.Name] = nodes_in(scope_of(call), ast.Name, into_functions=True)
    return not any(name.id == targets[0].id and isinstance(name.ctx, ast.Load) for name in names)


def _sum_for_mean(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A function that is called a mean, and returns or leaves the sum; and gradients that are
    added up."""
    function = enclosing_function(call)
    operation = argument(call, 1, "op")
    names = {getattr(value, "name", "") for value in program.values(operation)}
    is_sum = operation is None or names == {"torch.distributed.ReduceOp.SUM"}
    if function is None or not is_sum:
        return
    code = source.code(function)
    fix = "divide by dist.get_world_size(), or use ReduceOp.AVG"
    if _DIVIDES.search(code) is not None:
        return
    if _MEAN.search(function.name.lower()):
        message = f"{function.name} adds up over the ranks, and does not divide by their number"
        yield RULE.at(source, call, message, fix=fix)
    elif ".grad" in code and ".parameters()" in code:
        callers = [enclosing_function(caller) for caller in program.callers(function)]
        message = (
            "gradients are added up over the ranks, and not divided by their number: "
            "the steps grow with the world size"
        )
        if not any(caller is not None and _divides_loss(caller) for caller in callers):
            yield RULE.at(source, call, message, fix=fix)


def _divides_loss(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """`loss = model(batch) / world_size`, or a learning rate that is computed of it."""
    statements = [*nodes_in(function, ast.Assign), *nodes_in(function, ast.AugAssign)]
    divisions = nodes_in(function, ast.BinOp, ast.AugAssign)
    inside = {
        outer
        for division in divisions
        if isinstance(division.op, ast.Div)
        for outer in (division, *ancestors(division))
    }
    return any(
        statement in inside and re.search(r"loss|lr", ast.unparse(statement))
        for statement in statements
    )


def _is_sent(node: ast.AST) -> bool:
    """Whether the function sends something to all ranks afterwards."""
    later_calls = [later for later in calls_beside(node) if is_after(later, node)]
    return any(called_name(later) in _SENDING for later in later_calls)


@dataclass(frozen=True)
class _Holder:
    """A variable that has the result."""

    name: str
    since: ast.AST
    """Where it gets it."""

    @property
    def scope(self) -> ScopeNode:
        return scope_of(self.since)


def _holders(program: Program, since: ast.AST, name: str, depth: int = 0) -> Iterator[_Holder]:
    """The variables that have the result, also what is computed of it, and in other functions."""
    holder = _Holder(name, since)
    yield holder
    scope = holder.scope
    assignments = [
        assignment for assignment in nodes_in(scope, ast.Assign) if _is_of(assignment, holder)
    ]
    returns = nodes_in(scope, ast.Return)
    is_returned = any(name in map(dotted, nodes_in(value, ast.Name)) for value in returns)
    if isinstance(scope, ast.FunctionDef) and is_returned:
        assignments += _assignments(program, scope, depth)
    for assignment in assignments if depth < DEEPEST else ():
        target = dotted(assignment.targets[0])
        if target and not _is_sent(assignment):
            yield from _holders(program, assignment, target, depth + 1)


def _is_of(assignment: ast.Assign, holder: _Holder) -> bool:
    """`mean = (total / count).item()`"""
    names = map(dotted, nodes_in(assignment.value, ast.Name))
    calls = nodes_in(assignment.value, ast.Call)
    is_plain = all(called_name(call) in _KEEPING for call in calls)
    return is_plain and holder.name in names and is_after(assignment, holder.since)


def _is_in(node: ast.AST, expressions: list[ast.expr]) -> bool:
    return any(outer in expressions for outer in (node, *ancestors(node)))


def _assignments(program: Program, function: ast.FunctionDef, depth: int) -> Iterator[ast.Assign]:
    """The statements that assign what a function returns, also through functions that return it."""
    for caller in program.callers(function) if depth < DEEPEST else ():
        statement = parent_of(caller)
        outer = enclosing_function(caller)
        if isinstance(statement, ast.Assign):
            yield statement
        elif isinstance(statement, ast.Return) and isinstance(outer, ast.FunctionDef):
            yield from _assignments(program, outer, depth + 1)


def _decision(program: Program, holder: _Holder) -> ast.AST | None:
    """The step of a scheduler with the value, or a comparison of it in a loop that breaks."""
    names: list[ast.Name] = nodes_in(holder.scope, ast.Name)
    for use in names:
        is_read = use.id == holder.name and isinstance(use.ctx, ast.Load)
        if not is_read or not is_after(use, holder.since) or any(rank_tests_at(program, use)):
            continue
        calls = [outer for outer in ancestors(use) if isinstance(outer, ast.Call)]
        step = next((outer for outer in calls if called_name(outer) not in _KEEPING), None)
        if step is not None and called_name(step) == "step" and _is_in(use, step.args):
            return step
        branch = next((outer for outer in ancestors(use) if isinstance(outer, ast.If)), None)
        loop = loop_around(use)
        is_tested = branch is not None and branch.test in (use, *ancestors(use))
        if is_tested and loop is not None and nodes_in(loop, ast.Break):
            return use
    return None
