"""What a training loop does in every round, and what only in some: optimizers, schedulers and
scalers among it."""

from __future__ import annotations

import ast

from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.flow.loops import batch_loops, callees, calls_in, calls_made_in
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP, GRAD_SCALERS
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    Loop,
    ancestors,
    dotted,
    last_name,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import CallResult, ConstantValue

SCALERS = (*GRAD_SCALERS, "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler")


@cached_query
def training_loops(program: Program) -> list[Loop]:
    """The loops over batches of all files that train in several processes."""
    sources = distributed_sources(program)
    return [
        loop
        for source in program.sources
        if source in sources
        for loop in batch_loops(program, source)
    ]


def round_functions(program: Program, loop: ast.AST) -> dict[ast.AST, bool]:
    """The loop and all functions that its rounds run; each with whether it is only in some of the
    rounds."""
    functions: dict[ast.AST, bool] = {loop: False}
    pending = [loop]
    while pending:
        root = pending.pop(0)
        for call, function in callees(program, root):
            if function is not None and functions.get(function, True):
                rare = functions[root] or every_nth(program, call, root)
                if function not in functions or not rare:
                    functions[function] = rare
                    pending.append(function)
    return functions


def steps_of_rounds(program: Program, loop: ast.AST) -> list[tuple[ast.Call, bool]]:
    """The steps of optimizers, each with whether it is made only in some of the rounds."""
    return [
        (call, rare or every_nth(program, call, root))
        for root, rare in round_functions(program, loop).items()
        for call in optimizer_steps(program, root)
    ]


def every_nth(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Whether it is under `if (step + 1) % n == 0`, `if micro == n - 1`, or a flag that is computed
    so."""
    return any(
        _counts(program, test) or (holds and (_is_last(test) or _is_reset_there(test)))
        for test, holds in conditions(program, node)
        if parent_of(test) is not until and until in ancestors(test)
    )


def _is_last(test: ast.expr) -> bool:
    """`micro == n - 1`"""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and any(
            isinstance(side, ast.BinOp)
            and isinstance(side.op, ast.Sub)
            and isinstance(side.right, ast.Constant)
            for side in (test.left, *test.comparators)
        )
    )


def _is_reset_there(test: ast.expr) -> bool:
    """`if micro == n: ...; micro = 0`, of a counter that another statement increments."""
    block = parent_of(test)
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.GtE, ast.Eq)):
        return False
    counter = dotted(test.left)
    if not counter or not isinstance(block, ast.If):
        return False
    resets = [
        statement
        for statement in nodes_in(block, ast.Assign)
        if isinstance(statement.value, ast.Constant) and statement.value.value == 0
    ]
    is_reset = any(counter == dotted(target) for reset in resets for target in reset.targets)
    added = nodes_in(scope_of(block), ast.AugAssign)
    return is_reset and any(dotted(statement.target) == counter for statement in added)


def _counts(program: Program, test: ast.expr, depth: int = 0) -> bool:
    if any(isinstance(operation.op, ast.Mod) for operation in nodes_in(test, ast.BinOp)):
        return True
    values = [value for name in nodes_in(test, ast.Name) for value in program.assigned(name)]
    return depth < 2 and any(
        _is_last(value) or _counts(program, value, depth + 1)
        for value in values
        if isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp))
    )


@cached_query
def optimizer_steps(program: Program, root: ast.AST) -> list[ast.Call]:
    """`optimizer.step()` and `scaler.step(optimizer)` that are written in it."""
    return [
        call
        for call in calls_in(root)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and (is_optimizer(program, call.func.value) or is_scaler(program, call.func.value))
    ]


def is_method(call: ast.Call, *names: str) -> bool:
    """Whether it is `something.name(...)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def is_optimizer(program: Program, expression: ast.expr) -> bool:
    """By what made it; where that is not known, by its name."""
    made = [value.name for value in program.values(expression) if isinstance(value, CallResult)]
    if made:
        return any(".optim." in name and "lr_scheduler" not in name for name in made)
    name = last_name(expression).lower()
    return ("optim" in name or name == "opt") and "sched" not in name and "wrap" not in name


def is_scaler(program: Program, expression: ast.expr) -> bool:
    values = program.values(expression)
    made = [value for value in values if isinstance(value, CallResult)]
    if made:
        return any(value.name in SCALERS and not _is_off(program, value.call) for value in made)
    return not values and "scaler" in last_name(expression).lower()


def _is_off(program: Program, call: ast.Call) -> bool:
    option = argument(call, None, "enabled")
    return option is not None and program.values(option) == {ConstantValue(False)}


def wrapped_calls(program: Program, root: ast.AST) -> list[ast.Call]:
    return [call for call in calls_made_in(program, root) if program.made(call.func, DDP)]
