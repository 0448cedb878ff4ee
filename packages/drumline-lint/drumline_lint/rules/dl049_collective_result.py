"""DL049: the result of a collective is used where it is not what it seems.

Three mistakes: `reduce` gives its result to one rank, and all use it; a sum over the ranks is
called a mean; an asynchronous call is not waited for.
"""

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
    enclosing,
    enclosing_function,
    is_after,
    nodes_in,
    parent_of,
    scope_of,
    statement_of,
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
    """Results that not every rank has, that are sums and are called means, or that are not there
    yet."""
    for call in program.calls(source, "torch.distributed.reduce"):
        yield from _on_one_rank(program, source, call)

    for call in program.calls(source, "torch.distributed.all_reduce"):
        yield from _sum_for_mean(program, source, call)

    for call in program.calls(source, *COLLECTIVES, *_POINT_TO_POINT):
        if _is_left_running(program, call):
            message = (
                f"{source.code(call.func)} returns at once, and nothing waits until it is done"
            )
            fix = "keep what it returns, and call wait() before the tensor is used"
            yield RULE.at(source, call, message, fix=fix)


# Asynchronous calls.


def _is_left_running(program: Program, call: ast.Call) -> bool:
    """Whether it is asynchronous, and what it returns is thrown away or never used.

    dist.all_reduce(loss, async_op=True)
    print(loss)
    """
    is_async = program.values(argument(call, None, "async_op")) == {ConstantValue(True)}
    if not is_async and program.name_of(call.func) not in _POINT_TO_POINT:
        return False

    statement = parent_of(call)
    if isinstance(statement, ast.Expr):
        return True

    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return False

    handle = targets[0].id
    names = nodes_in(scope_of(call), ast.Name, into_functions=True)
    return not any(name.id == handle and isinstance(name.ctx, ast.Load) for name in names)


# Sums.


def _sum_for_mean(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A function that is called a mean, and returns or leaves the sum; and gradients that are
    added up.

    def average_gradients(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    """
    function = enclosing_function(call)
    code = "" if function is None else source.code(function)
    if function is None or not _adds(program, call) or _DIVIDES.search(code):
        return

    fix = "divide by dist.get_world_size(), or use ReduceOp.AVG"
    if _MEAN.search(function.name.lower()):
        message = f"{function.name} adds up over the ranks, and does not divide by their number"
        yield RULE.at(source, call, message, fix=fix)

    elif ".grad" in code and ".parameters()" in code:
        callers = [enclosing_function(caller) for caller in program.callers(function)]
        if not any(caller is not None and _divides_loss(caller) for caller in callers):
            message = (
                "gradients are added up over the ranks, and not divided by their number: "
                "the steps grow with the world size"
            )
            yield RULE.at(source, call, message, fix=fix)


def _adds(program: Program, call: ast.Call) -> bool:
    """Whether it is a sum: `dist.all_reduce(loss)`, `dist.all_reduce(loss,
    op=dist.ReduceOp.SUM)`."""
    operation = argument(call, 1, "op")
    names = {getattr(value, "name", "") for value in program.values(operation)}
    return operation is None or names == {"torch.distributed.ReduceOp.SUM"}


def _divides_loss(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a caller divides the loss, or a learning rate, by something.

    loss = loss_of(model(batch)) / world_size
    loss.backward()
    """
    for division in nodes_in(function, ast.BinOp, ast.AugAssign):
        if not isinstance(division.op, ast.Div):
            continue

        statement = statement_of(division)
        is_assignment = isinstance(statement, ast.Assign | ast.AugAssign)
        if is_assignment and re.search(r"loss|lr", ast.unparse(statement)):
            return True

    return False


# Results on one rank.


@dataclass(frozen=True)
class _Holder:
    """A variable that has the result."""

    name: str
    since: ast.AST
    """Where it gets it."""

    @property
    def scope(self) -> ScopeNode:
        return scope_of(self.since)


def _on_one_rank(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A result that one rank has, and by which every rank decides.

    dist.reduce(loss, 0)
    scheduler.step(loss)
    """
    tensor = dotted(call.args[0]) if call.args else ""
    if not tensor or any(rank_tests_at(program, call)) or _is_sent(call):
        return

    for holder in _holders(program, call, tensor):
        use = _decision(program, holder)
        if use is not None:
            line = program.source_of(use).place(use).line
            message = (
                f"only one rank gets the result of {source.code(call.func)}, "
                f"and every rank decides by it in line {line}"
            )
            yield RULE.at(source, call, message)
            return


def _is_sent(node: ast.AST) -> bool:
    """Whether the function sends something to all ranks afterwards: `dist.broadcast(loss, 0)`."""
    later_calls = [later for later in calls_beside(node) if is_after(later, node)]
    return any(called_name(later) in _SENDING for later in later_calls)


def _holders(program: Program, since: ast.AST, name: str, depth: int = 0) -> Iterator[_Holder]:
    """The variables that have the result, also what is computed of it, and in other functions.

    dist.reduce(loss, 0)         # loss
    mean = loss.item() / count   # mean
    """
    holder = _Holder(name, since)
    yield holder
    if depth == DEEPEST:
        return

    scope = holder.scope
    assignments = [part for part in nodes_in(scope, ast.Assign) if _is_computed_of(holder, part)]
    returned = [part for value in nodes_in(scope, ast.Return) for part in nodes_in(value, ast.Name)]
    if isinstance(scope, ast.FunctionDef) and name in map(dotted, returned):
        assignments += _assignments(program, scope, depth)

    for assignment in assignments:
        target = dotted(assignment.targets[0])
        if target and not _is_sent(assignment):
            yield from _holders(program, assignment, target, depth + 1)


def _is_computed_of(holder: _Holder, assignment: ast.Assign) -> bool:
    """Whether a result is no more than computed into another variable.

    mean = (total / count).item()
    """
    names = map(dotted, nodes_in(assignment.value, ast.Name))
    if holder.name not in names or not is_after(assignment, holder.since):
        return False

    return all(called_name(call) in _KEEPING for call in nodes_in(assignment.value, ast.Call))


def _assignments(program: Program, function: ast.FunctionDef, depth: int) -> Iterator[ast.Assign]:
    """The statements that assign what a function returns, also through functions that return it.

    loss = reduced(loss)  # where `def reduced(loss)` has the `dist.reduce`
    """
    for caller in program.callers(function) if depth < DEEPEST else ():
        statement = parent_of(caller)
        outer = enclosing_function(caller)
        if isinstance(statement, ast.Assign):
            yield statement
        elif isinstance(statement, ast.Return) and isinstance(outer, ast.FunctionDef):
            yield from _assignments(program, outer, depth + 1)


def _decision(program: Program, holder: _Holder) -> ast.AST | None:
    """The step of a scheduler with the value, or a comparison of it in a loop that breaks.

    scheduler.step(mean)
    if mean < best - patience:
        break
    """
    names: list[ast.Name] = nodes_in(holder.scope, ast.Name)
    for use in names:
        if use.id != holder.name or not isinstance(use.ctx, ast.Load):
            continue
        if not is_after(use, holder.since) or any(rank_tests_at(program, use)):
            continue

        step = _step_with(use)
        if step is not None:
            return step
        if _is_tested(use):
            return use

    return None


def _step_with(use: ast.Name) -> ast.Call | None:
    """The call of a scheduler's step with the value: `scheduler.step(mean)`, also of
    `mean.item()`."""
    for outer in ancestors(use):
        if isinstance(outer, ast.Call) and called_name(outer) not in _KEEPING:
            is_passed = any(part in outer.args for part in (use, *ancestors(use)))
            return outer if is_passed and called_name(outer) == "step" else None

    return None


def _is_tested(use: ast.Name) -> bool:
    """Whether the value is in the condition of the `if` around it, in a loop that breaks.

    if mean < best - patience:
        break
    """
    branch = enclosing(use, ast.If)
    if branch is None or branch.test not in (use, *ancestors(use)):
        return False

    loop = loop_around(use)
    return loop is not None and bool(nodes_in(loop, ast.Break))
