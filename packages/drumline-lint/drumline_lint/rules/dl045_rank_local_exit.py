"""DL045: one rank leaves a step, or enters a collective, by a value of its own.

Each rank has its own clock, memory, random numbers, signals, losses and batches. A rank that leaves
by one of them leaves the others in the next backward pass, unless the ranks exchange it first.
"""

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
from drumline_lint.program.calls import argument
from drumline_lint.program.names import COLLECTIVES
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import (
    Loop,
    ancestors,
    called_name,
    dotted,
    enclosing,
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
# What a rank decides by, in words.
_CLOCK = "its own clock"
_MEMORY = "its own memory"
_DRAWN = "its own random numbers"
_FILE = "a file that it sees"
_SIGNAL = "a signal that it got"
_METRIC = "the metric of its own part of the data"
_VALUES_OF_CALLS = {
    "time.time": _CLOCK,
    "time.monotonic": _CLOCK,
    "time.perf_counter": _CLOCK,
    "datetime.datetime.now": _CLOCK,
    "torch.cuda.memory_allocated": _MEMORY,
    "torch.cuda.memory_reserved": _MEMORY,
    "torch.cuda.mem_get_info": _MEMORY,
    "random.random": _DRAWN,
    "numpy.random.rand": _DRAWN,
    "numpy.random.random": _DRAWN,
    "os.path.exists": _FILE,
    "os.path.isfile": _FILE,
}
# Only these are certain for collectives in functions that are called.
_CERTAIN = (_CLOCK, _MEMORY, _SIGNAL, _DRAWN)
# Files that end when they have measured enough.
_MEASURING = re.compile(r"profil|bench")
_OPTIONS = {"args", "arg", "opt", "opts", "cfg", "config", "options", "hparams"}
_BROKEN = ("isnan", "isinf", "isfinite", "item")
_BATCHES = ("batch", "data", "sample", "samples", "images", "inputs")
_ORDERS = ast.Gt | ast.Lt | ast.GtE | ast.LtE | ast.NotEq
# Names of functions that let ranks agree.
_EXCHANGING = ("reduce", "gather", "sync", "broadcast", "agree")
_PATIENCE = set("patience early stop stopper stopping stale improve improvement bad".split())
_FAILURES = {"RuntimeError", "OutOfMemoryError", "Exception", "FloatingPointError", ""}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Exits of a loop that trains a distributed model, and collectives, under a condition that each
    rank decides for itself.

    if time.time() > deadline:
        break
    """
    is_uneven = "Join(" in source.text or ".join()" in source.text
    for loop in batch_loops(program, source):
        if not is_uneven and trains_together(program, loop):
            yield from _early_exits(program, source, loop)
            yield from _skipped_backwards(program, source, loop)
            yield from _caught_failures(program, source, loop)

    yield from _lone_collectives(program, source)


def _lone_collectives(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives under such a condition: `if random.random() < 0.1: dist.barrier()`.

    Of functions that call a collective, only those values count that surely differ.
    """
    calls = program.index(source).calls
    for name in likely_collective_names(program) & calls.keys():
        for call in calls[name]:
            reason = _reason(program, call) if enclosing(call, ast.If) is not None else ""
            if not reason:
                continue
            if reason not in _CERTAIN and program.name_of(call.func) not in COLLECTIVES:
                continue

            for collective, chain in collectives_in(program, call):
                if chain[0] is call:
                    message = (
                        f"a rank calls {short_name(collective)} by {reason}: "
                        "it blocks until every rank calls it"
                    )
                    yield RULE.at(source, call, message)
                    break


# Ranks that leave a loop, or a step.


def _early_exits(program: Program, source: Source, loop: ast.AST) -> Iterator[Finding]:
    """Exits from a round of training, or from the loop over epochs around it.

    A `continue` after the backward pass misses nothing.
    """
    outer_loops = [outer for outer in ancestors(loop) if isinstance(outer, ast.For | ast.While)]
    loops = [loop, *outer_loops]

    for exit_ in nodes_in(loops[-1], ast.Break, ast.Continue, ast.Return):
        if loop_around(exit_) not in loops:
            continue
        if isinstance(exit_, ast.Continue) and not _has_backward_after(loop, exit_):
            continue

        reason = _reason_to_leave(program, exit_)
        if reason:
            message = (
                f"a rank leaves here by {reason}, and the other ranks block in the backward pass"
            )
            severity = None if _is_sure(program, source, reason) else Severity.NOTE
            yield RULE.at(source, exit_, message, severity=severity)


def _reason_to_leave(program: Program, exit_: ast.stmt) -> str:
    """The value by which a rank leaves; empty if all leave together.

    A `return` by a file that exists is mostly before the first step, and the same for all ranks. A
    `break` may also be early stopping.
    """
    reason = _reason(program, exit_)
    if reason == _FILE and isinstance(exit_, ast.Return):
        return ""
    if not reason and isinstance(exit_, ast.Break) and _stops_by_own_metric(program, exit_):
        return _METRIC
    return reason


def _is_sure(program: Program, source: Source, reason: str) -> bool:
    """Whether ranks surely leave at different times, in a run that trains.

    Benchmarks end when they have measured enough; a launcher signals all ranks; and all ranks
    mostly see one disk.
    """
    if _MEASURING.search(source.path.stem.lower()):
        return False
    if reason == _METRIC:
        return is_of_ranks(program, source)
    if reason == _SIGNAL:  # with `os._exit`, a process ends even where it blocks
        return next(program.calls(source, "os._exit"), None) is None

    return reason != _FILE


def _skipped_backwards(program: Program, source: Source, loop: ast.AST) -> Iterator[Finding]:
    """Backward passes that some ranks leave out.

    if loss.item() < limit:
        loss.backward()

    Where the `else` has a backward pass as well, every rank makes one.
    """
    for call in nodes_in(loop, ast.Call):
        if called_name(call) != "backward" or program.function_of(call) is not None:
            continue

        branch = enclosing(call, ast.If)
        if branch is None or any(has_backward(program, part) for part in branch.orelse):
            continue

        reason = "" if is_within(call, "no_sync") else _reason(program, call)
        if reason:
            message = f"a rank skips the backward pass by {reason}, and the other ranks block in it"
            yield RULE.at(source, call, message)


def _has_backward_after(loop: ast.AST, node: ast.stmt) -> bool:
    """Whether a round still comes to its backward pass after this.

    A loop without one has it in a function: then nothing is known of the order.
    """
    calls = [call for call in nodes_in(loop, ast.Call) if called_name(call) == "backward"]
    return not calls or any(call.lineno > node.lineno for call in calls)


# Ranks that fail, and continue.


def _caught_failures(program: Program, source: Source, loop: ast.AST) -> Iterator[Finding]:
    """A failure around a backward pass, after which this rank alone continues.

    try:
        loss.backward()
    except RuntimeError:
        optimizer.zero_grad()
    """
    for attempt in nodes_in(loop, ast.Try):
        is_around = any(has_backward(program, part) for part in attempt.body)
        is_before = _has_backward_after(loop, attempt) and "loss" in ast.unparse(attempt)
        if not is_around and not is_before:
            continue

        for handler in attempt.handlers:
            is_left = isinstance(handler.body[-1], ast.Continue | ast.Break | ast.Return)
            if not (is_around or is_left) or not _is_failure(handler):
                continue
            if _repeats_or_agrees(program, handler) or _raises_when_out_of_memory(handler):
                continue

            if is_left or not always_exits(program, handler.body):
                message = (
                    "a rank that fails here continues by itself, and the other ranks block "
                    "in the backward pass"
                )
                yield RULE.at(source, handler, message)


def _is_failure(handler: ast.ExceptHandler) -> bool:
    """Whether it catches what may happen on one rank alone.

    Examples: `except RuntimeError`, `except (ValueError, torch.cuda.OutOfMemoryError)`, `except`.
    """
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or last_name(kind) in _FAILURES for kind in kinds)


def _repeats_or_agrees(program: Program, handler: ast.ExceptHandler) -> bool:
    """Whether it runs the backward pass again, or exchanges something with the other ranks.

    except RuntimeError:
        dist.all_reduce(has_failed)
    """
    calls = nodes_in(handler, ast.Call)
    return any(called_name(call) == "backward" or _exchanges(program, call) for call in calls)


def _raises_when_out_of_memory(handler: ast.ExceptHandler) -> bool:
    """Whether what may happen on one rank alone is raised again.

    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
    """
    for branch in nodes_in(handler, ast.If):
        if "out of memory" not in ast.unparse(branch.test):
            continue
        if any(nodes_in(statement, ast.Raise) for statement in branch.body):
            return True

    return False


# The values by which a rank decides.


def _reason(program: Program, node: ast.AST) -> str:
    """The value of its own by which a rank comes here; empty if all come, or have agreed.

    Asked are the conditions within a round of the loop. One on the rank is for another rule, and
    random numbers of one seed are the same on all ranks.
    """
    loop = loop_around(node)
    tests = [
        test
        for test, _ in conditions(program, node, with_exits=False)
        if loop is None or (loop in ancestors(test) and parent_of(test) is not loop)
    ]
    if any(rank_tests(program, test) or is_about_being_distributed(test) for test in tests):
        return ""

    reasons = (_own_value(program, test) for test in tests)
    reason = next((reason for reason in reasons if reason), "")
    if reason == _DRAWN and is_seeded_alike(program, program.source_of(node)):
        return ""

    return reason if reason and not _is_agreed(program, node, loop) else ""


def _is_agreed(program: Program, node: ast.AST, loop: ast.AST | None) -> bool:
    """Whether the ranks exchange something in the same step before it.

    stop = torch.tensor(time.time() > deadline)
    dist.all_reduce(stop)
    if stop:
        break
    """
    line = getattr(node, "lineno", 0)
    calls = nodes_in(loop or scope_of(node), ast.Call)
    before = [call for call in calls if call is not node and call.lineno <= line]
    return any(_exchanges(program, call) for call in before)


def _exchanges(program: Program, call: ast.Call) -> bool:
    """Whether a call lets ranks agree, by its name or by the collective in it.

    Examples: `dist.all_reduce(flag)`, `agree_on(flag)`; not `torch.gather(scores, 1, labels)`.
    """
    name = program.name_of(call.func)
    is_local = name.startswith("torch.") and not name.startswith("torch.distributed.")
    if not is_local and any(word in called_name(call).lower() for word in _EXCHANGING):
        return True

    return any(chain[0] is call for _, chain in collectives_in(program, call))


def _own_value(program: Program, test: ast.expr, depth: int = 0) -> str:
    """What of this rank alone a condition asks about, in words; empty if nothing.

    `its own clock` for `elapsed > limit`, where `elapsed = time.time() - start`.
    """
    reason = _value_of_calls(program, test)
    if reason:
        return reason

    signals = _set_by_signals(program, program.source_of(test))
    if any(dotted(name) in signals for name in nodes_in(test, ast.Name, ast.Attribute)):
        return _SIGNAL

    for name in nodes_in(test, ast.Name):
        reason = _value_of_step(name) or _assigned_value(program, name, depth)
        if reason:
            return reason

    return ""


def _value_of_calls(program: Program, test: ast.expr) -> str:
    """The value of a call, also of one in the `return` of a function: `time.time() > deadline`.

    def is_over(deadline):
        return time.time() > deadline
    """
    for call in nodes_in(test, ast.Call):
        function = program.function_of(call)
        returned = [] if function is None else nodes_in(function, ast.Return)
        inner = [part for value in returned for part in nodes_in(value, ast.Call)]

        for part in (call, *inner):
            reason = _VALUES_OF_CALLS.get(program.name_of(part.func))
            if reason:
                return reason

    return ""


def _set_by_signals(program: Program, source: Source) -> set[str]:
    """What the functions that handle signals assign.

    def handler(signum, frame):
        self.stop = True
    signal.signal(signal.SIGTERM, handler)
    """
    names = set[str]()
    for call in program.calls(source, "signal.signal"):
        for handler in program.values(argument(call, 1, "handler")):
            if not isinstance(handler, Function):
                continue

            for assignment in nodes_in(handler.node, ast.Assign):
                names.update(map(dotted, assignment.targets))

    return names


def _assigned_value(program: Program, name: ast.Name, depth: int) -> str:
    """The value that a variable was computed of, unless the ranks exchange it there.

    elapsed = time.time() - start             # its own clock
    elapsed = reduce_max(time.time() - start)  # the same on all
    """
    for value in program.assigned(name) if depth < 2 else ():
        if any(_exchanges(program, call) for call in nodes_in(value, ast.Call)):
            continue

        reason = _own_value(program, value, depth + 1)
        if reason:
            return reason

    return ""


def _value_of_step(name: ast.Name) -> str:
    """A loss that is compared or asked whether it is a number, and a batch that is empty.

    Examples: `loss > 100`, `torch.isnan(loss)`, `batch is None`.
    """
    outer = parent_of(name)
    operator = outer.ops[0] if isinstance(outer, ast.Compare) else None
    called = [called_name(node) for node in ancestors(name) if isinstance(node, ast.Call)]

    if "loss" in name.id.split("_"):
        is_method = isinstance(outer, ast.Attribute) and outer.attr in _BROKEN
        is_function = any(function in _BROKEN for function in called)
        if isinstance(operator, _ORDERS) or is_method or is_function:
            return f"its own {name.id}"

    if name.id in _BATCHES:
        is_broken = any(function in _BROKEN[:3] for function in called)
        return "its own batch" if is_broken or isinstance(operator, ast.Is) else ""
    return ""


# Early stopping.


def _stops_by_own_metric(program: Program, exit_: ast.Break) -> bool:
    """Early stopping by the metric of this rank's part of the data.

    for epoch in range(90):
        if evaluate(model, loader_of_this_rank) > best + patience:
            break
    """
    loop = loop_around(exit_)
    tests = [test for test, _ in conditions(program, exit_, with_exits=False)]
    if loop is None or _words(tests, loop).isdisjoint(_PATIENCE):
        return False
    if any(rank_tests(program, test) for test in tests):
        return False
    if any(_exchanges(program, call) for call in nodes_in(loop, ast.Call)):
        return False

    for addition in nodes_in(loop, ast.AugAssign):
        written = ast.unparse(addition)
        if "loss" in written and ".item()" in written:
            return True

    return _evaluates_part(program, program.source_of(exit_))


def _words(tests: list[ast.expr], loop: Loop) -> set[str]:
    """The words in the names of conditions: `early` and `stopping` of `early_stopping.stop`.

    Counters of the loop and options say nothing of a metric.
    """
    counted = nodes_in(loop.target, ast.Name) if isinstance(loop, ast.For) else []
    counters = {name.id for name in counted}
    words = set()
    for test in tests:
        for name in nodes_in(test, ast.Name, ast.Attribute):
            written = dotted(name)
            if written not in counters and _OPTIONS.isdisjoint(written.split(".")):
                words.update(last_name(name).lower().split("_"))

    return words


def _evaluates_part(program: Program, source: Source) -> bool:
    """Whether a loop or comprehension evaluates the model on this rank's part of the data.

    with torch.no_grad():
        losses = [loss_of(model(batch)) for batch in loader_of_this_rank]
    """
    if any(goes_over_part(program, loop) for loop in evaluation_loops(program, source)):
        return True

    index = program.index(source)
    return any(
        has_gradients_off(program, each) and is_part(program, each.generators[0].iter)
        for each in (*index.every(ast.ListComp), *index.every(ast.GeneratorExp))
    )
