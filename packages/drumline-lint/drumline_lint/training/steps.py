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
_COMPUTED = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp)
_DEEPEST_FLAG = 2
"""How many names a flag may be computed through."""


# The rounds of a loop.


@cached_query
def training_loops(program: Program) -> list[Loop]:
    """The loops over batches of all files that train in several processes."""
    distributed = distributed_sources(program)
    sources = [source for source in program.sources if source in distributed]
    return [loop for source in sources for loop in batch_loops(program, source)]


def round_functions(program: Program, loop: ast.AST) -> dict[ast.AST, bool]:
    """The loop and all functions that its rounds run; each with whether it is only in some of the
    rounds.

    for number, batch in enumerate(loader):
        train_step(batch)       # False
        if number % 100 == 0:
            evaluate(model)     # True
    """
    functions: dict[ast.AST, bool] = {loop: False}
    pending = [loop]

    while pending:
        root = pending.pop(0)
        for call, function in callees(program, root):
            if function is None or not functions.get(function, True):
                continue

            rare = functions[root] or every_nth(program, call, root)
            if function not in functions or not rare:
                functions[function] = rare
                pending.append(function)

    return functions


def steps_of_rounds(program: Program, loop: ast.AST) -> list[tuple[ast.Call, bool]]:
    """The steps of optimizers, each with whether it is made only in some of the rounds."""
    steps: list[tuple[ast.Call, bool]] = []
    for root, rare in round_functions(program, loop).items():
        for call in optimizer_steps(program, root):
            steps.append((call, rare or every_nth(program, call, root)))

    return steps


# Whether something is done only in some rounds.


def every_nth(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Whether it is under `if (step + 1) % n == 0`, `if micro == n - 1`, or a flag that is computed
    so."""
    for test, holds in conditions(program, node):
        if parent_of(test) is until or until not in ancestors(test):
            continue
        if _counts(program, test) or (holds and (_is_last(test) or _is_reset_there(test))):
            return True

    return False


def _is_last(test: ast.expr) -> bool:
    """`micro == n - 1`"""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False

    return any(_is_less_constant(side) for side in (test.left, *test.comparators))


def _is_less_constant(number: ast.expr) -> bool:
    """`n - 1`"""
    if not isinstance(number, ast.BinOp) or not isinstance(number.op, ast.Sub):
        return False

    return isinstance(number.right, ast.Constant)


def _is_reset_there(test: ast.expr) -> bool:
    """`if micro == n: ...; micro = 0`, of a counter that another statement increments."""
    block = parent_of(test)
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.GtE, ast.Eq)):
        return False

    counter = dotted(test.left)
    if not counter or not isinstance(block, ast.If):
        return False

    return _is_reset(block, counter) and _is_incremented(scope_of(block), counter)


def _is_reset(block: ast.If, counter: str) -> bool:
    """`micro = 0`"""
    for statement in nodes_in(block, ast.Assign):
        is_zero = isinstance(statement.value, ast.Constant) and statement.value.value == 0
        if is_zero and counter in map(dotted, statement.targets):
            return True

    return False


def _is_incremented(scope: ast.AST, counter: str) -> bool:
    """`micro += 1`"""
    return any(dotted(added.target) == counter for added in nodes_in(scope, ast.AugAssign))


def _counts(program: Program, test: ast.expr, depth: int = 0) -> bool:
    """Whether a condition has a remainder in it, or a name that is computed with one.

    is_update = (step + 1) % n == 0
    if is_update:
        ...
    """
    if any(isinstance(operation.op, ast.Mod) for operation in nodes_in(test, ast.BinOp)):
        return True
    if depth == _DEEPEST_FLAG:
        return False

    for name in nodes_in(test, ast.Name):
        for value in program.assigned(name):
            if not isinstance(value, _COMPUTED):
                continue
            if _is_last(value) or _counts(program, value, depth + 1):
                return True

    return False


# Optimizers and scalers.


@cached_query
def optimizer_steps(program: Program, root: ast.AST) -> list[ast.Call]:
    """`optimizer.step()` and `scaler.step(optimizer)` that are written in it."""
    steps: list[ast.Call] = []
    for call in calls_in(root):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
            stepping = call.func.value
            if is_optimizer(program, stepping) or is_scaler(program, stepping):
                steps.append(call)

    return steps


def is_method(call: ast.Call, *names: str) -> bool:
    """Whether it is `something.name(...)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def is_optimizer(program: Program, expression: ast.expr) -> bool:
    """By what made it; where that is not known, by its name."""
    makers = [value.name for value in program.values(expression) if isinstance(value, CallResult)]
    if makers:
        return any(".optim." in maker and "lr_scheduler" not in maker for maker in makers)

    name = last_name(expression).lower()
    if "sched" in name or "wrap" in name:
        return False
    return "optim" in name or name == "opt"


def is_scaler(program: Program, expression: ast.expr) -> bool:
    """By what made it, if that is not switched off; where nothing is known, by its name."""
    values = program.values(expression)
    made = [value for value in values if isinstance(value, CallResult)]
    if made:
        return any(value.name in SCALERS and not _is_off(program, value.call) for value in made)

    return not values and "scaler" in last_name(expression).lower()


def _is_off(program: Program, call: ast.Call) -> bool:
    """`GradScaler(enabled=False)`"""
    option = argument(call, None, "enabled")
    return option is not None and program.values(option) == {ConstantValue(False)}


def wrapped_calls(program: Program, root: ast.AST) -> list[ast.Call]:
    """The forward passes of models in DDP: `ddp_model(batch)`."""
    return [call for call in calls_made_in(program, root) if program.made(call.func, DDP)]
