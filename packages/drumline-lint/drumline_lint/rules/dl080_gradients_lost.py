"""DL080: gradients of micro-batches that never reach the step, or never the other ranks.

A step after several micro-batches adds their gradients up, and DDP averages them in the backward
pass of the last one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions, rest_of_block, split_condition
from drumline_lint.flow.loops import batch_loops
from drumline_lint.flow.some_ranks import is_within
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, Loop, ancestors, called_name, dotted, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import every_nth, is_method, steps_of_rounds

RULE = rule("DL080", only_distributed=False)

# `(index + 1) % n == 0 or index + 1 == len(loader)`
_OF_LAST_ROUND = re.compile(r"\bor\b|len\(|last|final|num_batches")

_UNSYNCED = (
    "the micro-batch before the step is under no_sync: every rank steps with gradients of its own"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Gradients that are cleared in every round with a step in some, and `no_sync` in the round
    that steps.

    For example:

        for index, batch in enumerate(loader):
            optimizer.zero_grad()
            compute_loss(batch).backward()
            if (index + 1) % 4 == 0:
                optimizer.step()
    """
    if "no_sync" in source.text:
        for loop in batch_loops(program, source):
            yield from _last_unsynced(program, source, loop)

    for loop in batch_loops(program, source) if "%" in source.text else ():
        steps = steps_of_rounds(program, loop)
        if not steps or not all(is_rare for _, is_rare in steps):
            continue

        step = steps[0][0]
        if loop in ancestors(step):
            yield from _cleared(program, source, loop, step)
            yield from _unsynced(program, source, loop, step)
            yield from _rest_unsynced(program, source, loop, step)
            yield from _never_synced(program, source, loop)


def _cleared(program: Program, source: Source, loop: Loop, step: ast.Call) -> Iterator[Finding]:
    """Gradients that are cleared in every round, where every round has a backward pass.

    Not in a handler, which gives a batch up:

        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad()
    """
    calls = nodes_in(loop, ast.Call)
    passes = [call for call in calls if is_method(call, "backward")]
    if any(every_nth(program, call, loop) for call in passes):
        return

    for call in calls:
        if not is_method(call, "zero_grad") or _tests(program, call, loop):
            continue

        is_handler = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call))
        if not is_handler and not every_nth(program, call, loop):
            message = (
                f"{source.code(call)} runs for every micro-batch, {source.code(step)} only after "
                "several: the gradients of all but the last are thrown away"
            )
            yield RULE.at(source, call, message)


def _tests(
    program: Program, node: ast.AST, within: ast.AST, *, with_exits: bool = False
) -> list[tuple[str, bool]]:
    """The conditions in a loop or function, as they are written, each with whether it holds; a flag
    is what was assigned to it.

    Of `optimizer.step()`, it is `[("(index + 1) % 4 == 0", True)]`:

        is_last = (index + 1) % 4 == 0
        if is_last:
            optimizer.step()
    """
    tests = []
    for whole, whole_holds in conditions(program, node, with_exits=with_exits):
        if within not in ancestors(whole):
            continue

        is_negated = isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.Not)
        parts = split_condition(whole, whole_holds) if is_negated else [(whole, whole_holds)]
        for test, holds in parts:
            values = program.assigned(test) if isinstance(test, ast.Name) else []
            meaning = values[0] if len(values) == 1 else test
            tests.append((ast.unparse(meaning), holds))

    return tests


# Rounds without an average over ranks


def _last_unsynced(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`no_sync` in the last round of a loop over the micro-batches of one step.

    For example:

        for micro in range(n):
            with model.no_sync() if micro == n - 1 else nullcontext():
                compute_loss(micro).backward()
    """
    rounds = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(loop, ast.For) or not isinstance(rounds, ast.Call):
        return
    if called_name(rounds) != "range":
        return

    last = f"{ast.unparse(loop.target)} == {ast.unparse(rounds.args[-1])} - 1"
    for attribute in nodes_in(loop, ast.Attribute):
        if attribute.attr == "no_sync" and (last, True) in _tests(program, attribute, loop):
            yield RULE.at(source, attribute, _UNSYNCED)


def _unsynced(program: Program, source: Source, loop: Loop, step: ast.Call) -> Iterator[Finding]:
    """Where `no_sync` is under the condition of the step, or under the opposite of a remainder that
    is off by one.

    For example:

        with model.no_sync() if index % 4 != 0 else nullcontext():
            compute_loss(batch).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
    """
    stepping = _tests(program, step, loop) or _tests(program, step, loop, with_exits=True)
    if len(stepping) != 1:
        return

    for place in (loop, *_helpers(program, source, loop)):
        for attribute in nodes_in(place, ast.Attribute):
            tests = _tests(program, attribute, place) if attribute.attr == "no_sync" else []
            if len(tests) == 1 and _meet(tests[0], stepping[0]):
                yield RULE.at(source, attribute, _UNSYNCED)


def _rest_unsynced(
    program: Program, source: Source, loop: Loop, step: ast.Call
) -> Iterator[Finding]:
    """A step after the loop, for its last rounds, if `no_sync` is under the opposite of the
    condition of the other steps: none of these rounds averages gradients.

    For example:

        for index, batch in enumerate(loader):
            is_due = (index + 1) % 4 == 0
            with nullcontext() if is_due else model.no_sync():
                compute_loss(batch).backward()
            if is_due:
                optimizer.step()
        optimizer.step()
    """
    stepping = _tests(program, step, loop)
    contexts = [part for part in nodes_in(loop, ast.Attribute) if part.attr == "no_sync"]
    if len(stepping) != 1 or not contexts:
        return

    test, holds = stepping[0]
    is_every_round = "%" not in test or "==" not in test or _OF_LAST_ROUND.search(test) is not None
    opposite = [(test, not holds)]
    if is_every_round or any(_tests(program, part, loop) != opposite for part in contexts):
        return

    for call in (
        call for statement in rest_of_block(loop) for call in nodes_in(statement, ast.Call)
    ):
        if is_method(call, "backward") or "reduce" in called_name(call):
            return

        if is_method(call, "step") and dotted(call.func) == dotted(step.func):
            message = (
                "the micro-batches since the last step in the loop are all under no_sync: "
                "every rank steps with gradients of its own"
            )
            fix = "leave no_sync out in the last round, too, or leave out this step"
            yield RULE.at(source, call, message, fix=fix)
            return


def _helpers(program: Program, source: Source, loop: Loop) -> list[FunctionNode]:
    """The functions of this file that its `with` blocks call, by parameters of the same names.

    For example:

        with sync_context(model, index):
            compute_loss(batch).backward()
    """
    helpers = []
    blocks = nodes_in(loop, ast.With)
    for call in [item.context_expr for block in blocks for item in block.items]:
        function = program.function_of(call) if isinstance(call, ast.Call) else None
        if function is None or program.source_of(function) is not source:
            continue

        passed = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
        names = {parameter.arg for parameter in function.args.args} - {"self"}
        if names <= passed:
            helpers.append(function)

    return helpers


def _meet(unsynced: tuple[str, bool], stepping: tuple[str, bool]) -> bool:
    """Whether both conditions hold in one round.

    They are the same, or a remainder is off by one:

        step % n != 0
        (step + 1) % n == 0
    """
    if unsynced == stepping:
        return True

    test, holds = unsynced
    step_test, step_holds = stepping
    if "+ 1) %" not in step_test or not step_test.endswith("== 0") or not step_holds:
        return False

    if holds:
        is_negated = test.endswith("!= 0")
        test = test.replace("!=", "==")
    else:
        is_negated = test.endswith("== 0")
    return is_negated and test == step_test.replace("(", "").replace(" + 1)", "")


def _never_synced(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`no_sync` around every backward pass, whatever the round.

    For example:

        for batch in loader:
            with model.no_sync():
                compute_loss(batch).backward()
    """
    calls = nodes_in(loop, ast.Call)
    passes = [call for call in calls if is_method(call, "backward")]
    if not passes or not all(is_within(call, "no_sync") for call in passes):
        return
    if any("reduce" in called_name(call) for call in calls):
        return

    for call in calls:
        if is_method(call, "no_sync") and not _tests(program, call, loop):
            message = (
                "every micro-batch is under no_sync, also the one before the step: "
                "gradients are never averaged over ranks"
            )
            yield RULE.at(source, call, message)
