"""DL012: gradients are exchanged at every micro-batch.

DDP averages gradients in each backward pass. If the optimizer steps only after several, all but
the last exchange are for nothing, unless `no_sync` switches them off.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_single_process
from drumline_lint.flow.loops import calls_in, loop_around
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    ancestors,
    enclosing_function,
    end_position,
    parent_of,
    position,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import (
    every_nth,
    is_method,
    optimizer_steps,
    round_functions,
    steps_of_rounds,
    training_loops,
    wrapped_calls,
)

RULE = rule("DL012", only_distributed=False)
_SWITCHES = ("no_sync", "grad_sync", "gradient_sync", "is_last_backward", "raise", "assert")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The backward of every micro-batch, where DDP exchanges gradients that no step uses yet.

    for number, batch in enumerate(loader):
        loss_of(model(batch)).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
    """
    for loop in training_loops(program):
        if program.source_of(loop) is source and not framework(program, source):
            yield from _unswitched(program, source, loop)


def _unswitched(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """The backwards of a loop that never switches the exchange off.

    Reported is what every round runs, if the step is rare and no round sets the gradients to zero.
    """
    functions = round_functions(program, loop)
    around = [enclosing_function(loop) or source.tree, *functions]
    texts = [program.source_of(function).code(function) for function in around]
    if any(word in text for text in texts for word in _SWITCHES):
        return
    if not wrapped_calls(program, loop):
        return

    step = _rare_step(program, loop)
    calls = [
        call
        for function, is_rare in functions.items()
        if not is_rare
        for call in calls_in(function)
        if not every_nth(program, call, function)
    ]
    if step is None or any(is_method(call, "zero_grad") for call in calls):
        return

    for call in calls:
        if not is_method(call, "backward") or program.function_of(call) is not None:
            continue
        if program.source_of(call) is not source or is_single_process(program, call):
            continue

        message = (
            f"{source.code(call)} averages gradients over all ranks at every micro-batch, "
            f"{program.source_of(step).code(step)} comes only after several"
        )
        yield RULE.at(source, call, message)


def _rare_step(program: Program, loop: Loop) -> ast.Call | None:
    """The step that is made after several rounds, or by a loop around when this one is through.

    for batch in loader:
        for micro_batch in batch.chunk(4):
            loss_of(model(micro_batch)).backward()
        optimizer.step()
    """
    steps = steps_of_rounds(program, loop)
    if steps:
        return steps[0][0] if all(is_rare for _, is_rare in steps) else None

    outer = loop_around(loop)
    if outer is None or "epoch" in ast.unparse(getattr(outer, "target", outer)):
        return None

    for step in optimizer_steps(program, outer):
        if position(step) > end_position(loop):
            return None if _is_conditional(program, step, outer) else step
    return None


def _is_conditional(program: Program, node: ast.AST, loop: Loop) -> bool:
    """Whether a condition is between a node and the loop around it.

    How often a step under `if is_ready:` is made is not known.
    """
    return any(
        loop in ancestors(test) and parent_of(test) is not loop
        for test, _ in conditions(program, node, with_exits=False)
    )
