"""DL045: one rank leaves a step, or enters a collective, by a value of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import (
    collective,
    collectives_in,
    likely_collective_names,
    short_name,
)
from drumline_lint.flow.conditions import always_exits, conditions, rank_tests, rest_of_block
from drumline_lint.flow.exits import Exit, exits, what_others_do
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.hosts import is_started_alone
from drumline_lint.flow.loops import batch_loops, evaluation_loops, loop_around
from drumline_lint.flow.some_ranks import has_backward, is_within
from drumline_lint.program.calls import argument
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import (
    SCOPES,
    ancestors,
    block_of,
    dotted,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import Function, LoopItem
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part
from drumline_lint.training.models import wraps_any
from drumline_lint.training.tensors import is_of_step

RULE = rule("DL045")
DEEPEST = 3
_CLOCKS = (
    "time.time",
    "time.monotonic",
    "time.perf_counter",
    "time.process_time",
    "datetime.datetime.now",
)
_MEMORY = tuple(
    f"torch.cuda.{name}" for name in ("memory_allocated", "memory_reserved", "mem_get_info")
)
_OWN_CALLS = {
    **dict.fromkeys(_CLOCKS, "its own clock"),
    **dict.fromkeys(_MEMORY, "its own memory"),
    "os.path.exists": "a file that it sees",
    "os.path.isfile": "a file that it sees",
}
# Only these are certain for collectives in functions that are called.
_CERTAIN = ("its own clock", "its own memory", "a signal that it got")
# They are the same on all ranks, as a sampler gives every rank batches of one size.
_SIZES = ("len", "shape", "size")
# Names of functions that are not given, and let ranks agree.
_EXCHANGING = ("reduce", "gather", "sync", "broadcast", "agree")
_PATIENCE = {"patience", "early", "stop", "stale", "improve", "improvement"}
# DDP's way to let ranks leave early.
_UNEVEN = re.compile(r"model\w*\.join\b|\bJoin\(")
_FAILURES = {"RuntimeError", "OutOfMemoryError", "Exception", "FloatingPointError", ""}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits and collectives under a condition that each rank decides for itself; a note where
    scripts start one process."""
    for finding in _findings(program, source):
        is_alone = is_started_alone(program, source)
        yield replace(finding, severity=Severity.NOTE) if is_alone else finding


def _findings(program: Program, source: Source) -> Iterator[Finding]:
    trains = wraps_any(program) and "backward" in source.text
    if trains and not _UNEVEN.search(source.text):
        yield from _early_exits(program, source)
        yield from _skipped_backward(program, source)
        yield from _caught_failures(program, source)
    yield from _lone_collectives(program, source)


def _early_exits(program: Program, source: Source) -> Iterator[Finding]:
    for exit_ in exits(program, source):
        if isinstance(exit_, ast.Expr) or not _is_in_training(program, exit_):
            continue  # a process that exits ends the job, which does not hang
        reason = _reason(program, exit_) if is_on_every_rank(program, exit_) else ""
        if not reason and _stops_by_own_loss(program, exit_):
            reason = "the losses of its own batches"
        if not reason and _stops_by_own_metric(program, exit_):
            reason = "the metric of its own part of the data"
        if reason and any(has_backward(program, [node]) for node in what_others_do(program, exit_)):
            message = (
                f"a rank leaves here by {reason}, and the other ranks block in the backward pass"
            )
            yield RULE.at(source, exit_, message)


def _skipped_backward(program: Program, source: Source) -> Iterator[Finding]:
    """`if loss < limit: loss.backward()`, in a loop."""
    for call in program.index(source).calls.get("backward", ()):
        loop = loop_around(call)
        if loop is None or not is_on_every_rank(program, call):
            continue
        alternatives = [branch.orelse for branch in ancestors(call) if isinstance(branch, ast.If)]
        is_always = any(has_backward(program, block) for block in alternatives if block)
        reason = "" if is_always or is_within(call, "no_sync") else _reason(program, call)
        if reason:
            message = f"a rank skips the backward pass by {reason}, and the other ranks block in it"
            yield RULE.at(source, call, message)


def _is_in_training(program: Program, exit_: Exit) -> bool:
    """Whether it leaves a round of a loop that trains, or a function that runs one."""
    function = enclosing_function(exit_)
    if isinstance(exit_, ast.Return) and function is not None and _trains(program, function):
        return True
    loop = loop_around(exit_)
    return loop is not None and _trains(program, loop)


@cached_query
def _trains(program: Program, node: ast.AST) -> bool:
    return has_backward(program, [node])


def _reason(program: Program, node: ast.AST) -> str:
    """The value of its own by which a rank comes here; empty if all come, or have agreed."""
    tests = [test for test, _ in _conditions_in_step(program, node)]
    if any(rank_tests(program, test) for test in tests) or _is_agreed(program, node):
        return ""
    reasons = (_own_value(program, test) for test in tests)
    return next((reason for reason in reasons if reason), "")


def _conditions_in_step(program: Program, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Those between it and the innermost loop, or its function."""
    loop = loop_around(node)
    for test, holds in conditions(program, node, with_exits=False):
        is_inside = loop is None or loop in ancestors(test)
        if is_inside and parent_of(test) is not loop:
            yield test, holds


def _is_agreed(program: Program, node: ast.AST) -> bool:
    """Whether the ranks exchange something in the same step before it."""
    inner = node
    for outer in ancestors(node):
        block = block_of(inner)
        before = block[: block.index(inner)] if isinstance(inner, ast.stmt) and block else []
        tests = [outer.test] if isinstance(outer, ast.If) else []
        if any(_exchanges(program, part) for part in (*before, *tests)):
            return True
        if isinstance(outer, (*SCOPES, ast.For, ast.While)):
            return False
        inner = outer
    return False


def _exchanges(program: Program, node: ast.AST) -> bool:
    if next(collectives_in(program, node), None) is not None:
        return True
    return any(
        word in last_name(call.func).lower()
        for call in nodes_in(node, ast.Call)
        if program.function_of(call) is None and not _is_of_one_process(program, call)
        for word in _EXCHANGING
    )


def _is_of_one_process(program: Program, call: ast.Call) -> bool:
    """`torch.gather`, `torch.cuda.synchronize`."""
    name = program.name_of(call.func)
    return name.startswith("torch.") and not name.startswith("torch.distributed.")


def _stops_by_own_loss(program: Program, exit_: Exit) -> bool:
    """`bad += 1` where the sum of this rank's losses is no better, and `if bad > 5: break`."""
    loop = loop_around(exit_)
    if loop is None or not isinstance(exit_, ast.Break) or _exchanges(program, loop):
        return False
    sums = {
        dotted(statement.target)
        for statement in nodes_in(loop, ast.AugAssign)
        if "loss" in ast.unparse(statement.value) and ".item()" in ast.unparse(statement.value)
    }
    counted = {
        dotted(statement.target)
        for statement in nodes_in(loop, ast.AugAssign)
        for test, _ in _conditions_in_step(program, statement)
        if sums & set(map(dotted, nodes_in(test, ast.Name)))
    }
    tests = [test for test, _ in _conditions_in_step(program, exit_)]
    return any(
        counted & set(map(dotted, nodes_in(test, ast.Name))) and not rank_tests(program, test)
        for test in tests
    )


def _stops_by_own_metric(program: Program, exit_: Exit) -> bool:
    """Early stopping by the metric of this rank's part of the data."""
    loop = loop_around(exit_)
    tests = [test for test, _ in _conditions_in_step(program, exit_)]
    words = {
        word
        for test in tests
        for name in nodes_in(test, ast.Name, ast.Attribute)
        for word in last_name(name).lower().split("_")
    }
    if loop is None or words.isdisjoint(_PATIENCE):
        return False
    if any(rank_tests(program, test) for test in tests):
        return False
    return not _exchanges(program, loop) and any(
        goes_over_part(program, evaluation)
        for evaluation in evaluation_loops(program, program.source_of(exit_))
    )


def _own_value(program: Program, test: ast.expr, depth: int = 0, *, is_empty: bool = False) -> str:
    """In words, what of this rank alone a condition asks about. Of a batch, whether it is empty:
    all else in it may be the same on all ranks."""
    for call in nodes_in(test, ast.Call):
        if reason := _OWN_CALLS.get(program.name_of(call.func), ""):
            return reason
        if reason := _returned(program, call):
            return reason
    for name in nodes_in(test, ast.Name, ast.Attribute):
        if dotted(name) in _set_by_signals(program, program.source_of(test)):
            return "a signal that it got"
    for name in nodes_in(test, ast.Name):
        if _is_size(name) or _is_number_of_elements(name):
            continue
        if is_of_step(program, name) or _is_loss(program, name):
            return f"its own {name.id}"
        if _asks_if_broken(name) and _is_of_batch(program, name):
            return "its own batch"
        asks_if_empty = is_empty or _asks_if_empty(name)
        if asks_if_empty and _is_of_batch(program, name) and not _is_passed(name):
            return "its own batch"
        for value in program.assigned(name) if depth < DEEPEST else ():
            if _exchanges(program, value):
                continue
            if reason := _own_value(program, value, depth + 1, is_empty=asks_if_empty):
                return reason
    return ""


def _returned(program: Program, call: ast.Call) -> str:
    """The same of what a function returns, if it asks no other rank."""
    function = program.function_of(call)
    if function is None or _exchanges(program, function):
        return ""
    values = [statement.value for statement in nodes_in(function, ast.Return) if statement.value]
    calls = [inner for value in values for inner in nodes_in(value, ast.Call)]
    names = [program.name_of(inner.func) for inner in calls]
    return next((_OWN_CALLS[name] for name in names if name in _OWN_CALLS), "")


@cached_query
def _set_by_signals(program: Program, source: Source) -> set[str]:
    """What the functions that handle signals assign."""
    handlers = [call.args[1] for call in program.calls(source, "signal.signal") if call.args[1:]]
    functions = [
        value.node
        for handler in handlers
        for value in program.values(handler)
        if isinstance(value, Function)
    ]
    assignments = [
        statement for function in functions for statement in nodes_in(function, ast.Assign)
    ]
    return {dotted(target) for statement in assignments for target in statement.targets}


def _is_loss(program: Program, name: ast.Name) -> bool:
    """A parameter with that name, of which no more is known."""
    kinds = [binding.kind for binding in program.bindings(name)]
    return name.id == "loss" and kinds == ["parameter"] and not program.values(name)


def _is_size(name: ast.Name) -> bool:
    """`len(batch["x"]) < 8`, `x.shape`, `x.size(0)`, `loss is None`; an empty batch is one of this
    rank alone."""
    is_size = False
    for outer in ancestors(name):
        if isinstance(outer, ast.Attribute) and outer.attr == "requires_grad":
            return True
        called = outer.func if isinstance(outer, ast.Call) else outer
        is_size = is_size or (
            isinstance(called, ast.Name | ast.Attribute) and last_name(called) in _SIZES
        )
        if isinstance(outer, ast.Compare):
            is_identity = any(isinstance(operator, ast.Is | ast.IsNot) for operator in outer.ops)
            is_batch = outer.left is name and name.id in ("batch", "data", "sample", "samples")
            compared = outer.comparators[0]
            is_empty = isinstance(compared, ast.Constant) and compared.value == 0
            return (is_identity and not is_batch) or (is_size and not is_empty)
        if not isinstance(outer, ast.Attribute | ast.Subscript | ast.Call):
            return False
    return False


def _is_number_of_elements(name: ast.Name) -> bool:
    outer = parent_of(name)
    return isinstance(outer, ast.Attribute) and outer.attr in ("numel", "ndim", "dim")


def _asks_if_empty(name: ast.Name) -> bool:
    """`not batch`, `batch is None`, `len(batch) == 0`, `batch["x"].size(0) == 0`"""
    for outer in ancestors(name):
        if isinstance(outer, ast.UnaryOp):
            return isinstance(outer.op, ast.Not)
        if isinstance(outer, ast.Compare):
            compared = outer.comparators[0]
            return isinstance(compared, ast.Constant) and compared.value in (0, None)
        if not isinstance(outer, ast.Attribute | ast.Subscript | ast.Call):
            return False
    return False


def _asks_if_broken(name: ast.Name) -> bool:
    """`torch.isnan(images).any()`"""
    calls = [outer for outer in ancestors(name) if isinstance(outer, ast.Call)]
    return any(last_name(call.func) in ("isnan", "isinf", "isfinite") for call in calls)


def _is_passed(name: ast.Name) -> bool:
    """To a function, of whose result nothing is known."""
    return any(
        isinstance(outer, ast.Call) and name in outer.args and last_name(outer.func) not in _SIZES
        for outer in ancestors(name)
    )


def _is_of_batch(program: Program, name: ast.Name) -> bool:
    iterables = [value.of for value in program.values(name) if isinstance(value, LoopItem)]
    if any(_counts(program, iterable) for iterable in iterables):
        return False
    return any(
        program.iterated(loop.iter) is iterable
        for iterable in iterables
        for loop in batch_loops(program, program.source_of(iterable))
        if isinstance(loop, ast.For | ast.AsyncFor)
    )


def _counts(program: Program, iterable: ast.expr) -> bool:
    """Whether it may be `range(...)`, whatever shows its progress."""
    return any(
        isinstance(part, ast.Call) and last_name(part.func) in ("range", "trange", "count")
        for part in parts(program, iterable)
    )


def _caught_failures(program: Program, source: Source) -> Iterator[Finding]:
    """`except RuntimeError` around a backward pass, after which this rank alone continues."""
    for attempt in program.index(source).every(ast.Try):
        if loop_around(attempt) is None or not is_on_every_rank(program, attempt):
            continue
        if not has_backward(program, attempt.body) and not _is_before_backward(program, attempt):
            continue
        for handler in attempt.handlers:
            is_repeated = has_backward(program, handler.body)
            if _is_failure(handler) and not is_repeated and not _ends_job(program, handler):
                message = (
                    "a rank that fails here continues by itself, and the other ranks block "
                    "in the backward pass"
                )
                yield RULE.at(source, handler, message)


def _is_before_backward(program: Program, attempt: ast.Try) -> bool:
    """Whether it computes a loss that the statements after it run backward."""
    names = {dotted(target) for part in nodes_in(attempt, ast.Assign) for target in part.targets}
    is_skipped = any(always_exits(program, handler.body) for handler in attempt.handlers)
    return is_skipped and any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and dotted(call.func.value) in names
        for statement in rest_of_block(attempt)
        for call in nodes_in(statement, ast.Call)
    )


def _is_failure(handler: ast.ExceptHandler) -> bool:
    kinds: Sequence[ast.expr | None] = [handler.type]
    if isinstance(handler.type, ast.Tuple):
        kinds = handler.type.elts
    return any(kind is None or last_name(kind) in _FAILURES for kind in kinds)


def _ends_job(program: Program, handler: ast.ExceptHandler) -> bool:
    """Whether the process ends, at least if there are others, or tells them."""
    tests = [branching.test for branching in nodes_in(handler, ast.If)]
    if any(map(is_about_being_distributed, tests)) or _exchanges(program, handler):
        return True
    last = handler.body[-1]
    is_left = isinstance(last, ast.Continue | ast.Break | ast.Return)
    return always_exits(program, handler.body) and not is_left


def _lone_collectives(program: Program, source: Source) -> Iterator[Finding]:
    likely = likely_collective_names(program)
    for call in program.index(source).every(ast.Call):
        if last_name(call.func) not in likely or argument(call, None, "group") is not None:
            continue
        if next(_conditions_in_step(program, call), None) is None:
            continue
        chains = collectives_in(program, call)
        name = next((name for name, chain in chains if chain[0] is call), "")
        reason = _reason(program, call) if name else ""
        is_direct = collective(program, call) in COLLECTIVES
        if reason and (is_direct or reason in _CERTAIN):
            message = (
                f"a rank calls {short_name(name)} by {reason}: it blocks until every rank calls it"
            )
            yield RULE.at(source, call, message)
