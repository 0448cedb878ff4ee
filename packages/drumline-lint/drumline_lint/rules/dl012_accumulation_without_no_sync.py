"""DL012: gradients are exchanged at every micro-batch."""

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
    """The backward of every micro-batch."""
    for loop in training_loops(program):
        if program.source_of(loop) is source and not framework(program, source):
            yield from _unswitched(program, source, loop)


def _unswitched(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    roots = round_functions(program, loop)
    around = [enclosing_function(loop) or source.tree, *roots]
    texts = [program.source_of(node).code(node) for node in around]
    if any(word in text for text in texts for word in _SWITCHES) or not wrapped_calls(
        program, loop
    ):
        return
    step = _rare_step(program, loop)
    rounds = [root for root, rare in roots.items() if not rare]
    calls = [
        call for root in rounds for call in calls_in(root) if not every_nth(program, call, root)
    ]
    if step is None or any(is_method(call, "zero_grad") for call in calls):
        return
    for call in calls:
        is_last = is_method(call, "backward") and program.function_of(call) is None
        if is_last and program.source_of(call) is source and not is_single_process(program, call):
            message = (
                f"{source.code(call)} averages gradients over all ranks at every micro-batch, "
                f"{program.source_of(step).code(step)} comes only after several"
            )
            yield RULE.at(source, call, message)


def _rare_step(program: Program, loop: Loop) -> ast.Call | None:
    """The step that is made after several rounds, or by a loop around when this one is through."""
    steps = steps_of_rounds(program, loop)
    if steps:
        return steps[0][0] if all(rare for _, rare in steps) else None
    outer = loop_around(loop)
    is_of_epochs = outer is None or "epoch" in ast.unparse(getattr(outer, "target", outer))
    after = [] if outer is None or is_of_epochs else optimizer_steps(program, outer)
    later = [call for call in after if position(call) > end_position(loop)]
    return later[0] if later and not any(_inner_tests(program, later[0], outer)) else None


def _inner_tests(program: Program, node: ast.AST, loop: ast.AST | None) -> list[ast.expr]:
    """The conditions between a node and the loop around it."""
    held = conditions(program, node, with_exits=False)
    return [
        test
        for test, _ in held
        if loop is not None and loop in ancestors(test) and parent_of(test) is not loop
    ]
