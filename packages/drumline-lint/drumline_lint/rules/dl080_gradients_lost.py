"""DL080: gradients of micro-batches that never reach the step, or never the other ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions, split_condition
from drumline_lint.flow.loops import batch_loops
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, Loop, ancestors, called_name, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import every_nth, is_method, steps_of_rounds

RULE = rule("DL080", only_distributed=False)
_UNSYNCED = (
    "the micro-batch before the step is under no_sync: every rank steps with gradients of its own"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`zero_grad` in every round with a step in some; `no_sync` in the round that steps."""
    for loop in batch_loops(program, source) if "no_sync" in source.text else ():
        yield from _last_unsynced(program, source, loop)
    for loop in batch_loops(program, source) if "%" in source.text else ():
        steps = steps_of_rounds(program, loop)
        if not steps or not all(rare for _, rare in steps) or loop not in ancestors(steps[0][0]):
            continue
        step = steps[0][0]
        calls = nodes_in(loop, ast.Call)
        is_every = not any(
            every_nth(program, call, loop) for call in calls if is_method(call, "backward")
        )
        for call in calls if is_every else ():
            is_handler = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call))
            is_rare = bool(_tests(program, call, loop)) or every_nth(program, call, loop)
            if is_method(call, "zero_grad") and not is_handler and not is_rare:
                message = (
                    f"{source.code(call)} runs for every micro-batch, {source.code(step)} only after "
                    "several: the gradients of all but the last are thrown away"
                )
                yield RULE.at(source, call, message)
        yield from _unsynced(program, source, loop, step)
        yield from _never_synced(program, source, loop)


def _tests(
    program: Program, node: ast.AST, within: ast.AST, *, with_exits: bool = False
) -> list[tuple[str, bool]]:
    """The conditions in a loop or function, as they are written; a flag is what was assigned to
    it."""
    written = []
    for whole, whole_holds in conditions(program, node, with_exits=with_exits):
        is_negated = isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.Not)
        parts = split_condition(whole, whole_holds) if is_negated else [(whole, whole_holds)]
        for test, holds in parts if within in ancestors(whole) else ():
            values = program.assigned(test) if isinstance(test, ast.Name) else []
            text = ast.unparse(values[0] if len(values) == 1 else test)
            written.append((text, holds))
    return written


def _unsynced(program: Program, source: Source, loop: Loop, step: ast.Call) -> Iterator[Finding]:
    """Where `no_sync` is under the condition of the step, or under the opposite of a remainder that
    is off by one."""
    stepping = _tests(program, step, loop) or _tests(program, step, loop, with_exits=True)
    for place in (loop, *_helpers(program, source, loop)):
        for attribute in nodes_in(place, ast.Attribute):
            tests = _tests(program, attribute, place) if attribute.attr == "no_sync" else []
            if len(tests) == len(stepping) == 1 and _meet(tests[0], stepping[0]):
                yield RULE.at(source, attribute, _UNSYNCED)


def _last_unsynced(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`model.no_sync() if micro == n - 1`, in a loop over the micro-batches of one step."""
    rounds = loop.iter if isinstance(loop, ast.For) else None
    is_counted = isinstance(rounds, ast.Call) and called_name(rounds) == "range"
    if not isinstance(loop, ast.For) or not isinstance(rounds, ast.Call) or not is_counted:
        return
    last = f"{ast.unparse(loop.target)} == {ast.unparse(rounds.args[-1])} - 1"
    for attribute in nodes_in(loop, ast.Attribute):
        if attribute.attr == "no_sync" and (last, True) in _tests(program, attribute, loop):
            yield RULE.at(source, attribute, _UNSYNCED)


def _helpers(program: Program, source: Source, loop: Loop) -> list[FunctionNode]:
    """The functions of this file that its `with` blocks call, by parameters of the same names."""
    blocks = nodes_in(loop, ast.With)
    items = [item.context_expr for block in blocks for item in block.items]
    helpers = []
    for call in items:
        function = program.function_of(call) if isinstance(call, ast.Call) else None
        if function is None or not isinstance(call, ast.Call):
            continue
        passed = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
        names = {parameter.arg for parameter in function.args.args} - {"self"}
        if program.source_of(function) is source and names <= passed:
            helpers.append(function)
    return helpers


def _never_synced(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`with model.no_sync():` around every backward pass, whatever the round."""
    calls = nodes_in(loop, ast.Call)
    passes = [call for call in calls if is_method(call, "backward")]
    is_reduced = any("reduce" in called_name(call) for call in calls)
    if is_reduced or not passes or not all(is_within(call, "no_sync") for call in passes):
        return
    for call in calls:
        if is_method(call, "no_sync") and not _tests(program, call, loop):
            message = (
                "every micro-batch is under no_sync, also the one before the step: "
                "gradients are never averaged over ranks"
            )
            yield RULE.at(source, call, message)


def _meet(unsynced: tuple[str, bool], stepping: tuple[str, bool]) -> bool:
    """Whether both hold in one round: the same condition, or `step % n != 0` and
    `(step + 1) % n == 0`."""
    if unsynced == stepping:
        return True
    is_step_shifted = "+ 1) %" in stepping[0] and stepping[0].endswith("== 0") and stepping[1]
    skips = unsynced[0].replace("!=", "==") if unsynced[1] else unsynced[0]
    is_negated = unsynced[0].endswith("!= 0") if unsynced[1] else unsynced[0].endswith("== 0")
    plain = stepping[0].replace("(", "").replace(" + 1)", "")
    return is_step_shifted and is_negated and skips == plain
