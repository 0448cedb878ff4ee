"""DL012: gradients are exchanged at every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_now_and_then
from drumline_lint.flow.loops import calls_in, loop_around
from drumline_lint.flow.never_run import is_never_run
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    Loop,
    ancestors,
    dotted,
    enclosing_function,
    end_position,
    nodes_in,
    parent_of,
    position,
    scope_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import (
    every_nth,
    is_method,
    optimizer_steps,
    round_functions,
    training_loops,
    wrapped_calls,
)

RULE = rule("DL012", only_distributed=False)
SWITCHES = {
    "no_sync",
    "require_backward_grad_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The backward of every micro-batch."""
    for call, step in _unswitched(program):
        if program.source_of(call) is source and not is_never_run(program, call):
            yield RULE.at(
                source,
                call,
                f"{source.code(call)} averages gradients over all ranks at every micro-batch, "
                f"{program.source_of(step).code(step)} comes only after several",
            )

    for call in program.index(source).calls.get("no_sync", ()):
        yield from _without_forward(program, source, call)
    yield from _never_synced(program, source)


def _never_synced(program: Program, source: Source) -> Iterator[Finding]:
    """Loops whose every backward pass is under `with model.no_sync():`."""
    for loop in training_loops(program) if "no_sync" in source.text else ():
        if program.source_of(loop) is not source:
            continue
        calls = list(calls_in(loop))
        passes = [call for call in calls if is_method(call, "backward")]
        managers = [call for call in calls if is_method(call, "no_sync")]
        is_plain = all(
            isinstance(parent_of(call), ast.withitem) and not any(_inner_tests(program, call, loop))
            for call in managers
        )
        are_all_in = bool(passes) and all(is_within(call, "no_sync") for call in passes)
        if are_all_in and is_plain and managers and optimizer_steps(program, loop):
            message = "every backward pass is under no_sync: the gradients are never averaged"
            fix = "leave the last micro-batch of each step out of no_sync"
            yield RULE.at(source, managers[0], message, fix=fix)


def _inner_tests(program: Program, node: ast.AST, loop: Loop) -> Iterator[ast.expr]:
    """The conditions between a node and the loop around it."""
    for test, _ in conditions(program, node, with_exits=False):
        if loop in ancestors(test):
            yield test


def _without_forward(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """`with model.no_sync(): loss.backward()`: DDP decides in the forward pass."""
    item = parent_of(call)
    block = None if item is None else parent_of(item)
    model = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if not isinstance(block, ast.With) or not model:
        return
    inside = [inner for statement in block.body for inner in nodes_in(statement, ast.Call)]
    around = nodes_in(scope_of(call), ast.Call)
    before = [earlier for earlier in around if position(earlier) < position(block)]
    is_called_before = any(dotted(earlier.func) == model for earlier in before)
    is_called_inside = any(_may_run(program, inner, model) for inner in inside)
    has_backward = any(is_method(inner, "backward") for inner in inside)
    if has_backward and is_called_before and not is_called_inside:
        message = (
            f"only the backward pass is in {source.code(call)}: "
            "DDP decides in the forward pass whether to average gradients"
        )
        yield RULE.at(source, call, message, fix="put the forward pass into the block as well")


def _may_run(program: Program, call: ast.Call, model: str) -> bool:
    """Whether a call may run the model."""
    return dotted(call.func) == model or program.function_of(call) is not None


@cached_query
def _unswitched(program: Program) -> list[tuple[ast.Call, ast.Call]]:
    return [
        (call, accumulation.step)
        for accumulation in accumulations(program)
        if not framework(program, program.source_of(accumulation.loop))
        and not _is_switched(program, accumulation)
        if wrapped_calls(program, accumulation.loop)
        for call in every_round(program, accumulation, "backward")
        if program.function_of(call) is None
    ]


def _is_switched(program: Program, accumulation: Accumulation) -> bool:
    """Whether something in the functions around and in it says when gradients are exchanged."""
    around = enclosing_function(accumulation.loop) or program.source_of(accumulation.loop).tree
    if any("accum" in ast.unparse(check.test).lower() for check in _refusals(around)):
        return True  # several ranks and several micro-batches do not come together
    for root in (around, *accumulation.roots):
        for node in nodes_in(root, ast.Attribute, ast.Name, ast.Constant):
            word = (
                getattr(node, "attr", None)
                or getattr(node, "id", None)
                or getattr(node, "value", None)
            )
            if isinstance(word, str) and (word in SWITCHES or "no_sync" in word):
                return True
    return False


def _refusals(function: ast.AST) -> Iterator[ast.Assert | ast.If]:
    """`assert args.accumulation == 1`, and an `if` that raises."""
    for check in nodes_in(function, ast.Assert, ast.If):
        if isinstance(check, ast.Assert) or isinstance(check.body[0], ast.Raise):
            yield check


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A loop over micro-batches."""

    loop: Loop
    roots: dict[ast.AST, bool]
    """It and the functions that it runs, with whether it does so only at every nth round."""
    step: ast.Call
    """Of the optimizer: at every nth round, or after the loop."""


def accumulations(program: Program) -> Iterator[Accumulation]:
    for loop in training_loops(program):
        roots = round_functions(program, loop, every_nth)
        steps = [
            (call, rare or every_nth(program, call, root))
            for root, rare in roots.items()
            for call in optimizer_steps(program, root)
        ]
        step = None
        if not steps:
            step = _step_after(program, loop)
        elif all(rare for _, rare in steps):
            step = steps[0][0]
        accumulation = None if step is None else Accumulation(loop, roots, step)
        if (
            accumulation is not None
            and next(every_round(program, accumulation, "zero_grad"), None) is None
        ):
            yield accumulation


def _step_after(program: Program, loop: Loop) -> ast.Call | None:
    """The step that the loop around makes when this one is through; a loop over epochs has none."""
    outer = loop_around(loop)
    if outer is None:
        return None
    for root, rare in round_functions(program, outer).items():
        for call in optimizer_steps(program, root):
            is_other = root is outer and (
                loop_around(call) is not outer or position(call) < end_position(loop)
            )
            if not rare and not is_other and not is_now_and_then(program, call, root):
                return call
    return None


def every_round(program: Program, accumulation: Accumulation, *methods: str) -> Iterator[ast.Call]:
    for root, rare in accumulation.roots.items():
        for call in calls_in(root):
            if is_method(call, *methods) and not rare and not every_nth(program, call, root):
                yield call
