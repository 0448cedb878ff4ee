"""DL005: every epoch has the same order.

A DistributedSampler seeds its permutation with the epoch, which only `set_epoch` tells it. It is
reported if it shuffles, feeds a loop over epochs, and no `set_epoch` of the program may be its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import batch_loops, outer_loops
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import is_one, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    Loop,
    called_name,
    calls_beside,
    enclosing,
    enclosing_function,
    owner_of,
)
from drumline_lint.program.value import CallResult, ConstantValue, Instance, Method
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders, passed_on_by, training_loops

RULE = rule("DL005", in_tests=False)
_EVALUATION = re.compile(r"eval(uat(e|ion))?|val(id|ation)?|test(ing)?|dev")
_WORD = re.compile(r"[A-Z]?[a-z]+")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers that shuffle, in programs that train for epochs and never call `set_epoch`."""
    for sampler in program.calls(source, DISTRIBUTED_SAMPLER):
        if framework(program, source) or not _shuffles(program, sampler):
            continue
        if _is_of_evaluation(source, sampler) or not _is_of_epochs(program, sampler):
            continue
        if not _may_be_set(program, sampler):
            yield _finding(program, source, sampler)


def _finding(program: Program, source: Source, sampler: ast.Call) -> Finding:
    """The finding at the sampler, or at a `set_epoch` that is given a constant.

    It is a note in a notebook and for a run of one epoch, which may never have a second one.
    """
    is_mild = source.is_notebook or _is_of_one_epoch(program, sampler)
    severity = Severity.NOTE if is_mild else None

    call = _call_with_constant(program, source, sampler)
    if call is not None:
        message = "set_epoch is called with one number only: every epoch has the same order"
        return RULE.at(source, call, message, severity=severity)

    dataset = argument(sampler, 0, "dataset")
    of_dataset = "" if dataset is None else f" of {source.code(dataset)}"
    message = (
        f"the DistributedSampler{of_dataset} shuffles, but set_epoch is never called: "
        "every epoch has the same order"
    )
    return RULE.at(source, sampler, message, severity=severity)


# The sampler.


def _shuffles(program: Program, sampler: ast.Call) -> bool:
    """Whether it shuffles, as it does by default, and nothing unknown may change that.

    `DistributedSampler(data)` does, `DistributedSampler(data, **options)` may not.
    """
    shuffle = argument(sampler, 3, "shuffle")
    is_on = shuffle is None or ConstantValue(True) in program.values(shuffle)
    return is_on and not has_unknown_arguments(sampler)


def _is_of_evaluation(source: Source, sampler: ast.Call) -> bool:
    """Whether the names of its dataset, function or file say so.

    The order of an evaluation does not matter. Examples: `DistributedSampler(val_data)`, any
    sampler in `def evaluate()` or in `test_net.py`.
    """
    names = source.path.stem
    dataset = argument(sampler, 0, "dataset")
    if dataset is not None:
        names += f" {ast.unparse(dataset)}"

    function = enclosing_function(sampler)
    if function is not None:
        names += f" {function.name}"

    return any(_EVALUATION.fullmatch(word.lower()) for word in _WORD.findall(names))


# The epochs.


def _is_of_one_epoch(program: Program, sampler: ast.Call) -> bool:
    """Whether all loops over epochs of its file make one round, unless a user asks for more.

    Examples: `for epoch in range(1)`, `while epoch < args.epochs` where the option's default is 1.
    """
    index = program.index(program.source_of(sampler))
    heads = [loop.iter for loop in index.every(ast.For) if _names_epochs(loop.iter, loop.target)]
    heads += [loop.test for loop in index.every(ast.While) if _names_epochs(loop.test)]

    ends = [end for head in heads for end in _end_of(head)]
    return bool(ends) and all(is_one(program, end) for end in ends)


def _names_epochs(*expressions: ast.expr) -> bool:
    """Whether the head of a loop speaks of epochs: `epoch`, `range(args.num_epochs)`."""
    return any("epoch" in ast.unparse(expression).lower() for expression in expressions)


def _end_of(head: ast.expr) -> list[ast.expr]:
    """The number that a loop counts to: `3` of `range(0, 3)` and of `epoch < 3`."""
    if isinstance(head, ast.Compare):
        return head.comparators[-1:]

    return head.args[-1:] if isinstance(head, ast.Call) else []


def _is_of_epochs(program: Program, sampler: ast.Call) -> bool:
    """Whether a loop over epochs is around the loop over its loader.

    for epoch in range(90):
        for batch in loader:
            ...
    """
    for loader, loops in training_loops(program).items():
        made = program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
        if any(value.call is sampler for value in made):
            is_repeated = any(any(outer_loops(program, loop)) for loop in loops)
            return is_repeated or loader in _repeated_loaders(program)

    return _may_feed_epochs(program, sampler)


def _may_feed_epochs(program: Program, sampler: ast.Call) -> bool:
    """Whether its loader is made beside it, in a program that trains for epochs.

    No loop is seen to use such a loader: it may be an attribute, or in a dictionary.

    sampler = DistributedSampler(data)
    self.loaders["train"] = DataLoader(data, sampler=sampler)
    """
    calls = calls_beside(sampler)
    loaders_beside = [call for call in calls if program.name_of(call.func) == LOADER]
    if any(loader in training_loops(program) for loader in loaders_beside):
        return False  # the program trains with these

    samplers = [given(loader, "sampler") for loader in loaders_beside]
    if not any(sampler in written_values(program, part) for part in samplers):
        return False

    return _trains_for_epochs(program, connected(program, program.source_of(sampler)))


@cached_query
def _repeated_loaders(program: Program) -> set[ast.Call]:
    """The loaders that a generator goes over again and again.

    def forever(loader):
        while True:
            yield from loader
    """
    repeated = set[ast.Call]()
    for source in program.sources:
        if "yield" not in source.text:
            continue

        for function in program.index(source).every(ast.FunctionDef):
            for passed_on in passed_on_by(function):
                if enclosing(passed_on, ast.While) is not None:
                    repeated.update(loaders(program, passed_on))

    return repeated


@cached_query
def _trains_for_epochs(program: Program, sources: frozenset[Source]) -> bool:
    """Whether these files wrap a model in DDP, and train it in loops within loops over epochs.

    A framework calls `set_epoch` itself, so none of the files may use one.
    """
    if not any("DistributedDataParallel" in source.text for source in sources):
        return False
    if any(framework(program, source) for source in sources):
        return False

    loops = [loop for source in sources for loop in batch_loops(program, source)]
    return bool(loops) and all(_is_in_epochs(program, loop) for loop in loops)


def _is_in_epochs(program: Program, loop: Loop) -> bool:
    """Whether a loop is within a loop over epochs, also one of its function's callers.

    for epoch in range(num_epochs):
        train(loader)
    """
    outside = outer_loops(program, loop)
    return any(isinstance(outer, ast.For) and _names_epochs(outer.iter) for outer in outside)


# Calls of `set_epoch`.


def _has_constant(call: ast.Call) -> bool:
    """Whether it sets the same epoch each time: `sampler.set_epoch(0)`."""
    return bool(call.args) and isinstance(call.args[0], ast.Constant)


def _may_be_sampler(program: Program, expression: ast.expr | None, sampler: ast.Call) -> bool:
    """Whether an expression may have this sampler as its value.

    sampler = DistributedSampler(data) if distributed else RandomSampler(data)
    """
    values = program.values(expression)
    return any(isinstance(value, CallResult) and value.call is sampler for value in values)


def _call_with_constant(program: Program, source: Source, sampler: ast.Call) -> ast.Call | None:
    """The call on this sampler that sets the same epoch each time, if there is one.

    for epoch in range(90):
        sampler.set_epoch(0)
    """
    for call in program.index(source).calls.get("set_epoch", ()):
        if _has_constant(call) and _may_be_sampler(program, owner_of(call), sampler):
            return call
    return None


def _may_be_set(program: Program, sampler: ast.Call) -> bool:
    """Whether its epoch may be set.

    It is by a `set_epoch` on something that may be this sampler, and may be where a library gets
    it: `Trainer(model, sampler=sampler)`.
    """
    if _is_handed_on(program, sampler):
        return True

    return any(
        not _is_of_other_sampler(program, call, sampler)
        for source in connected(program, program.source_of(sampler))
        for call in program.index(source).calls.get("set_epoch", ())
    )


def _is_handed_on(program: Program, sampler: ast.Call) -> bool:
    """Whether a library's function beside it gets a sampler, and may set its epoch.

    sampler = DistributedSampler(data)
    trainer = Trainer(model, sampler)
    """
    for call in calls_beside(sampler):
        is_unknown = program.name_of(call.func) != LOADER and program.function_of(call) is None
        if not is_unknown or called_name(call) in ("len", "isinstance", "print"):
            continue
        if any(program.made(value, DISTRIBUTED_SAMPLER) for value in call.args):
            return True

    return False


def _is_of_other_sampler(program: Program, call: ast.Call, sampler: ast.Call) -> bool:
    """Whether a `set_epoch` is known to be of another sampler, or has the same number each time.

    Its owner may be a sampler, `loader.sampler`, or an object of the program with such a method.
    """
    if _has_constant(call):
        return True

    owner = owner_of(call)
    if _may_be_sampler(program, owner, sampler):
        return False

    values = program.values(owner)
    for value in values:
        holder = value.of if isinstance(value, Method) else value
        if isinstance(holder, Instance):
            return True
        if not isinstance(holder, CallResult) or not holder.name.startswith("torch.utils.data."):
            return False  # `getattr(loader, "sampler", None)`

        samplers = [holder]
        if holder.name == LOADER:
            samplers = program.made(given(holder.call, "sampler"), DISTRIBUTED_SAMPLER)
        if not samplers or any(made.call is sampler for made in samplers):
            return False

    return bool(values)
