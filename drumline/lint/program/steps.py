"""What a training loop does in every round, and what only in some: optimizers, schedulers and scalers among it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from drumline.lint.program.distributed import distributed_sources
from drumline.lint.program.guards import conditions, is_now_and_then
from drumline.lint.program.loops import batch_loops, calls_in, done_in
from drumline.lint.program.names import DDP, FSDP, GRAD_SCALERS
from drumline.lint.program.program import Program, argument
from drumline.lint.program.tree import LOOPS, Loop, above, inside, last_name, up
from drumline.lint.program.value import Known, Made

Answer = TypeVar("Answer")
IsRare = Callable[[Program, ast.AST, ast.AST], bool]
SCALERS = (*GRAD_SCALERS, "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler")
_KEPT: WeakKeyDictionary[Program, dict[Hashable, Any]] = WeakKeyDictionary()


def kept(program: Program, key: Hashable, find: Callable[[], Answer]) -> Answer:
    """What was found for this program before: rules ask it again for every file."""
    answers = _KEPT.setdefault(program, {})
    if key not in answers:
        answers[key] = find()
    found: Answer = answers[key]
    return found


def training_loops(program: Program) -> list[Loop]:
    """The loops over batches of all files that train in several processes."""
    return kept(program, "training loops", lambda: _find_loops(program))


def _find_loops(program: Program) -> list[Loop]:
    found = distributed_sources(program)
    return [loop for source in program.sources if source in found for loop in batch_loops(program, source)]


def rounds(program: Program, loop: ast.AST, is_rare: IsRare = is_now_and_then) -> dict[ast.AST, bool]:
    """The loop and all functions that its rounds run; each with whether it is only in some of the rounds."""
    found: dict[ast.AST, bool] = {loop: False}
    pending = [loop]
    while pending:
        root = pending.pop(0)
        for call in calls_in(root):
            function = program.function_of(call)
            if function is not None:
                rare = found[root] or is_rare(program, call, root)
                if function not in found or (found[function] and not rare):
                    found[function] = rare
                    pending.append(function)
    return found


def every_nth(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Whether it is under `if (step + 1) % n == 0`, or a flag that is computed so."""
    return any(_counts(program, test) for test, _ in _conditions_until(program, node, until))


def _conditions_until(program: Program, node: ast.AST, until: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    for test, holds in conditions(program, node):
        if up(test) is not until and until in above(test):
            yield test, holds


def _counts(program: Program, test: ast.expr, depth: int = 0) -> bool:
    if any(isinstance(one.op, ast.Mod) for one in inside(test, ast.BinOp)):
        return True
    if depth > 2:
        return False
    return any(
        _counts(program, value, depth + 1)
        for name in inside(test, ast.Name)
        for value in program.assigned(name)
        if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp)
    )


def optimizer_steps(program: Program, root: ast.AST) -> Iterator[ast.Call]:
    """`optimizer.step()` and `scaler.step(optimizer)` that are written in it."""
    for call in calls_in(root):
        if is_method(call, "step") and (
            is_optimizer(program, call.func.value) or is_scaler(program, call.func.value)
        ):  # type: ignore[attr-defined]
            yield call


def scheduler_steps(program: Program, root: ast.AST) -> Iterator[ast.Call]:
    """`scheduler.step()` that is written in it."""
    for call in calls_in(root):
        if is_method(call, "step") and is_scheduler(program, call.func.value):  # type: ignore[attr-defined]
            yield call


def is_method(call: ast.Call, *names: str) -> bool:
    """Whether it is `something.name(...)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def is_optimizer(program: Program, expression: ast.expr) -> bool:
    """By what made it; where that is not known, by its name."""
    made = [value.name for value in program.values(expression) if isinstance(value, Made)]
    if made:
        return any(".optim." in name and "lr_scheduler" not in name for name in made)
    name = last_name(expression).lower()
    return ("optim" in name or name in ("opt", "optim")) and "sched" not in name


def is_scheduler(program: Program, expression: ast.expr) -> bool:
    """By what made it; where that is not known, by its name."""
    made = [value.name for value in program.values(expression) if isinstance(value, Made)]
    if made:
        return any("lr_scheduler" in name or "_schedule" in name for name in made)
    return "sched" in last_name(expression).lower()


def is_scaler(program: Program, expression: ast.expr) -> bool:
    """A GradScaler that is not switched off."""
    values = program.values(expression)
    made = [value for value in values if isinstance(value, Made)]
    if made:
        return any(value.name in SCALERS and not _is_off(program, value.call) for value in made)
    return not values and "scaler" in last_name(expression).lower()


def _is_off(program: Program, call: ast.Call) -> bool:
    given = argument(call, None, "enabled")
    return given is not None and program.values(given) == {Known(False)}


def wrapped_calls(program: Program, root: ast.AST) -> list[ast.Call]:
    """The forwards of models in DDP that a loop comes to."""
    return [call for call in done_in(program, root) if is_wrapped(program, call.func)]


def is_wrapped(program: Program, expression: ast.expr) -> bool:
    """Whether it is a model in DDP, and not one in FSDP."""
    made = {value.name for value in program.values(expression) if isinstance(value, Made)}
    return DDP in made and not made & set(FSDP)


def outer_loop(loop: ast.AST) -> Loop | None:
    """The next loop around it in the same text."""
    return next((one for one in above(loop) if isinstance(one, LOOPS)), None)
