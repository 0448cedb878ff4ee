"""DL045: one rank leaves a step, or enters a collective, by a value of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in, likely_collective_names, short_name
from drumline_lint.flow.conditions import always_exits, conditions, rank_tests
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.loops import batch_loops, evaluation_loops, has_gradients_off, loop_around
from drumline_lint.flow.some_ranks import has_backward, is_within
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    dotted,
    last_name,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import Function
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part, is_part, trains_together
from drumline_lint.training.seeds import is_seeded_alike

RULE = rule("DL045")
_DRAWN = "its own random numbers"
_OWN_CALLS = {
    "time.time": "its own clock",
    "time.monotonic": "its own clock",
    "time.perf_counter": "its own clock",
    "datetime.datetime.now": "its own clock",
    "torch.cuda.memory_allocated": "its own memory",
    "torch.cuda.memory_reserved": "its own memory",
    "torch.cuda.mem_get_info": "its own memory",
    **dict.fromkeys(("random.random", "numpy.random.rand", "numpy.random.random"), _DRAWN),
    "os.path.exists": "a file that it sees",
    "os.path.isfile": "a file that it sees",
}
# Only these are certain for collectives in functions that are called.
_SIGNAL = "a signal that it got"
_CERTAIN = ("its own clock", "its own memory", _SIGNAL, _DRAWN)
# Mostly the same for all ranks, which see one disk and end with one job.
_SEEN_BY_ALL = ("a file that it sees",)
# They end when they have measured enough.
_MEASURING = re.compile(r"profil|bench")
_METRIC = "the metric of its own part of the data"
_OPTIONS = {"args", "arg", "opt", "opts", "cfg", "config", "options", "hparams"}
_BROKEN = ("isnan", "isinf", "isfinite", "item")
# Names of functions that let ranks agree.
_EXCHANGING = ("reduce", "gather", "sync", "broadcast", "agree")
_PATIENCE = {
    "patience",
    "early",
    "stop",
    "stopper",
    "stopping",
    "stale",
    "improve",
    "improvement",
    "bad",
}
_FAILURES = {"RuntimeError", "OutOfMemoryError", "Exception", "FloatingPointError", ""}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits of a loop that trains a distributed model, and collectives, under a condition that each
    rank decides for itself."""
    is_uneven = "Join(" in source.text or ".join()" in source.text
    loops = [] if is_uneven else batch_loops(program, source)
    for loop in (loop for loop in loops if trains_together(program, loop)):
        yield from _early_exits(program, source, loop)
        yield from _caught_failures(program, source, loop)
    yield from _lone_collectives(program, source)


def _lone_collectives(program: Program, source: Source) -> Iterator[Finding]:
    likely = likely_collective_names(program)
    for name in likely & program.index(source).calls.keys():
        for call in program.index(source).calls[name]:
            if not any(isinstance(outer, ast.If) for outer in ancestors(call)):
                continue
            reason = _reason(program, call)
            if not reason:
                continue
            names = [name for name, chain in collectives_in(program, call) if chain[0] is call]
            is_certain = reason in _CERTAIN or program.name_of(call.func) in COLLECTIVES
            if names and is_certain:
                message = (
                    f"a rank calls {short_name(names[0])} by {reason}: "
                    "it blocks until every rank calls it"
                )
                yield RULE.at(source, call, message)


def _early_exits(program: Program, source: Source, loop: ast.AST) -> Iterator[Finding]:
    """In a round of training, or in the loop over epochs around it."""
    around = [loop, *(outer for outer in ancestors(loop) if isinstance(outer, ast.For | ast.While))]
    exits = nodes_in(around[-1], ast.Break, ast.Continue, ast.Return)
    for exit_ in (exit_ for exit_ in exits if loop_around(exit_) in around):
        reason = _reason(program, exit_)
        if reason == "a file that it sees" and isinstance(exit_, ast.Return):
            reason = ""
        if not reason and isinstance(exit_, ast.Break) and _stops_by_own_metric(program, exit_):
            reason = _METRIC
        is_after = isinstance(exit_, ast.Continue) and not _has_backward_after(loop, exit_)
        if reason and not is_after:
            message = (
                f"a rank leaves here by {reason}, and the other ranks block in the backward pass"
            )
            is_shown = reason != _METRIC or is_of_ranks(program, source)
            is_shown = is_shown and not _MEASURING.search(source.path.stem.lower())
            is_shown = is_shown and not (reason == _SIGNAL and _ends_by_itself(program, source))
            is_sure = is_shown and reason not in _SEEN_BY_ALL
            severity = None if is_sure else Severity.NOTE
            yield RULE.at(source, exit_, message, severity=severity)
    for call in nodes_in(loop, ast.Call):
        is_last = called_name(call) == "backward" and program.function_of(call) is None
        branch = next((outer for outer in ancestors(call) if isinstance(outer, ast.If)), None)
        is_only = branch is not None and not any(
            has_backward(program, part) for part in branch.orelse
        )
        reason = (
            _reason(program, call) if is_last and is_only and not is_within(call, "no_sync") else ""
        )
        if reason:
            message = f"a rank skips the backward pass by {reason}, and the other ranks block in it"
            yield RULE.at(source, call, message)


def _ends_by_itself(program: Program, source: Source) -> bool:
    """Whether a process that got a signal ends even where it blocks: a launcher signals all ranks."""
    return next(program.calls(source, "os._exit"), None) is not None


def _has_backward_after(loop: ast.AST, exit_: ast.stmt) -> bool:
    calls = [call for call in nodes_in(loop, ast.Call) if called_name(call) == "backward"]
    return not calls or any(call.lineno > exit_.lineno for call in calls)


def _reason(program: Program, node: ast.AST) -> str:
    """The value of its own by which a rank comes here; empty if all come, or have agreed."""
    loop = loop_around(node)
    tests = [
        test
        for test, _ in conditions(program, node, with_exits=False)
        if (loop is None or loop in ancestors(test)) and parent_of(test) is not loop
    ]
    if any(rank_tests(program, test) or is_about_being_distributed(test) for test in tests):
        return ""
    reasons = [_own_value(program, test) for test in tests]
    reason = next((reason for reason in reasons if reason), "")
    if reason == _DRAWN and is_seeded_alike(program, program.source_of(node)):
        return ""
    return reason if reason and not _is_agreed(program, node, loop) else ""


def _is_agreed(program: Program, node: ast.AST, loop: ast.AST | None) -> bool:
    """Whether the ranks exchange something in the same step before it."""
    line = getattr(node, "lineno", 0)
    place = loop or scope_of(node)
    return any(
        call is not node and call.lineno <= line and _exchanges(program, call)
        for call in nodes_in(place, ast.Call)
    )


def _exchanges(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    is_local = name.startswith("torch.") and not name.startswith("torch.distributed.")
    is_named = any(word in called_name(call).lower() for word in _EXCHANGING)
    return (is_named and not is_local) or any(
        chain[0] is call for _, chain in collectives_in(program, call)
    )


def _own_value(program: Program, test: ast.expr, depth: int = 0) -> str:
    """In words, what of this rank alone a condition asks about."""
    for call in nodes_in(test, ast.Call):
        if reason := _OWN_CALLS.get(program.name_of(call.func), ""):
            return reason
        function = program.function_of(call)
        returned = [] if function is None else nodes_in(function, ast.Return)
        for inner in (inner for value in returned for inner in nodes_in(value, ast.Call)):
            if reason := _OWN_CALLS.get(program.name_of(inner.func), ""):
                return reason
    for name in nodes_in(test, ast.Name, ast.Attribute):
        if dotted(name) in _set_by_signals(program, program.source_of(test)):
            return _SIGNAL
    for name in nodes_in(test, ast.Name):
        if reason := _own_of_step(name):
            return reason
        for value in program.assigned(name) if depth < 2 else ():
            is_exchanged = any(_exchanges(program, call) for call in nodes_in(value, ast.Call))
            if not is_exchanged and (reason := _own_value(program, value, depth + 1)):
                return reason
    return ""


def _own_of_step(name: ast.Name) -> str:
    """A loss that is compared or asked whether it is a number, and a batch that is empty."""
    outer = parent_of(name)
    called = [called_name(node) for node in ancestors(name) if isinstance(node, ast.Call)]
    attribute = outer.attr if isinstance(outer, ast.Attribute) else ""
    is_compared = isinstance(outer, ast.Compare) and isinstance(
        outer.ops[0], ast.Gt | ast.Lt | ast.GtE | ast.LtE | ast.NotEq
    )
    is_asked = is_compared or attribute in _BROKEN or any(word in called for word in _BROKEN)
    if "loss" in name.id.split("_") and is_asked:
        return f"its own {name.id}"
    is_batch = name.id in ("batch", "data", "sample", "samples", "images", "inputs")
    is_empty = isinstance(outer, ast.Compare) and isinstance(outer.ops[0], ast.Is)
    is_broken = any(word in called for word in _BROKEN[:3])
    return "its own batch" if is_batch and (is_empty or is_broken) else ""


def _set_by_signals(program: Program, source: Source) -> set[str]:
    """What the functions that handle signals assign."""
    handlers = [call.args[1] for call in program.calls(source, "signal.signal") if call.args[1:]]
    values = [value for handler in handlers for value in program.values(handler)]
    functions = [value.node for value in values if isinstance(value, Function)]
    statements = [inner for function in functions for inner in nodes_in(function, ast.Assign)]
    return {dotted(target) for statement in statements for target in statement.targets}


def _stops_by_own_metric(program: Program, exit_: ast.Break) -> bool:
    """Early stopping by the metric of this rank's part of the data."""
    tests = [test for test, _ in conditions(program, exit_, with_exits=False)]
    loop = loop_around(exit_)
    counters = {dotted(name) for name in nodes_in(getattr(loop, "target", exit_), ast.Name)}
    words = {
        word
        for test in tests
        for name in nodes_in(test, ast.Name, ast.Attribute)
        if dotted(name) not in counters and _OPTIONS.isdisjoint(dotted(name).split("."))
        for word in last_name(name).lower().split("_")
    }
    if (
        loop is None
        or words.isdisjoint(_PATIENCE)
        or any(rank_tests(program, test) for test in tests)
    ):
        return False
    if any(_exchanges(program, call) for call in nodes_in(loop, ast.Call)):
        return False
    source = program.source_of(exit_)
    has_evaluation = any(
        goes_over_part(program, part) for part in evaluation_loops(program, source)
    )
    comprehensions = [
        *program.index(source).every(ast.ListComp),
        *program.index(source).every(ast.GeneratorExp),
    ]
    has_evaluation = has_evaluation or any(
        has_gradients_off(program, each) and is_part(program, each.generators[0].iter)
        for each in comprehensions
    )
    sums = [part for part in nodes_in(loop, ast.AugAssign) if ".item()" in ast.unparse(part.value)]
    return has_evaluation or any("loss" in ast.unparse(part) for part in sums)


def _caught_failures(program: Program, source: Source, loop: ast.AST) -> Iterator[Finding]:
    """`except RuntimeError` around a backward pass, after which this rank alone continues."""
    for attempt in nodes_in(loop, ast.Try):
        is_around = any(has_backward(program, part) for part in attempt.body)
        is_before = (
            not is_around and _has_backward_after(loop, attempt) and "loss" in ast.unparse(attempt)
        )
        for handler in attempt.handlers if is_around or is_before else ():
            calls = nodes_in(handler, ast.Call)
            is_repeated = any(called_name(call) == "backward" for call in calls)
            is_told = any(_exchanges(program, call) for call in calls)
            is_left = isinstance(handler.body[-1], ast.Continue | ast.Break | ast.Return)
            is_ended = always_exits(program, handler.body) and not is_left
            is_ended = is_ended or _raises_when_out_of_memory(handler)
            is_skipped = is_around or is_left
            if _is_failure(handler) and is_skipped and not (is_repeated or is_told or is_ended):
                message = (
                    "a rank that fails here continues by itself, and the other ranks block "
                    "in the backward pass"
                )
                yield RULE.at(source, handler, message)


def _raises_when_out_of_memory(handler: ast.ExceptHandler) -> bool:
    """`if "out of memory" in str(error): raise`: what is not raised is not meant to be skipped."""
    return any(
        isinstance(raising, ast.Raise) and "out of memory" in ast.unparse(branch.test)
        for branch in nodes_in(handler, ast.If)
        for statement in branch.body
        for raising in nodes_in(statement, ast.Raise)
    )


def _is_failure(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or last_name(kind) in _FAILURES for kind in kinds)
