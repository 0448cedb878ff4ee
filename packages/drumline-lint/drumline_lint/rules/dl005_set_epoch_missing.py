"""DL005: every epoch has the same order."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import outer_loops
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import called_definitions, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import CallResult, ConstantValue, Instance, Method, Values
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, training_loops

RULE = rule("DL005")
_KNOWN = (CallResult, Method, Instance, ConstantValue)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers that shuffle, of loaders that a training loop goes through again and again."""
    calls = list(program.calls(source, DISTRIBUTED_SAMPLER))
    if not calls or framework(program, source):
        return
    for call in calls:
        is_candidate = _shuffles(program, call) and not _is_of_evaluation(call)
        fed = _loaders_of(program, call) if is_candidate else []
        if fed and not _has_set_epoch(program, call, fed) and not _is_handed_on(program, call, fed):
            dataset = argument(call, 0, "dataset")
            of = "" if dataset is None else f" of {source.code(dataset)}"
            message = (
                f"the DistributedSampler{of} shuffles, but set_epoch is never called: "
                "every epoch has the same order"
            )
            yield RULE.at(source, call, message)


def _is_of_evaluation(call: ast.Call) -> bool:
    """By the dataset's name: the order of an evaluation does not matter."""
    dataset = argument(call, 0, "dataset")
    words = [] if dataset is None else last_name(dataset).lower().split("_")
    return not {"eval", "val", "valid", "validation", "test", "dev"}.isdisjoint(words)


def _shuffles(program: Program, call: ast.Call) -> bool:
    if has_unknown_arguments(call):
        return False
    shuffle = argument(call, 3, "shuffle")
    origins = written_values(program, shuffle)
    return shuffle is None or any(
        isinstance(origin, ast.Constant) and origin.value is True for origin in origins
    )


def _loaders_of(program: Program, sampler: ast.Call) -> list[ast.Call]:
    """The loaders with this sampler that training iterates over several times."""
    loaders = []
    for loader, loops in training_loops(program).items():
        samplers = [
            made.call for made in program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
        ]
        is_again = any(True for loop in loops for _ in outer_loops(program, loop))
        if sampler in samplers and is_again:
            loaders.append(loader)
    return loaders


def _has_set_epoch(program: Program, sampler: ast.Call, loaders: list[ast.Call]) -> bool:
    """Whether there is a `set_epoch` on it, on a loader that has it, or on something unknown that
    may be it."""
    for source in connected(program, program.source_of(sampler)):
        for call in program.index(source).calls.get("set_epoch", ()):
            is_number = bool(call.args) and isinstance(call.args[0], ast.Constant)
            if isinstance(call.func, ast.Attribute) and not is_number:
                owners = program.values(call.func.value)
                are_known = owners and all(isinstance(owner, _KNOWN) for owner in owners)
                if not are_known or any(_is_one_of(owners, [sampler, *loaders])):
                    return True
    return False


def _is_one_of(values: Values, calls: list[ast.Call]) -> Iterator[bool]:
    """The sampler itself, or `loader.sampler`."""
    for value in values:
        owner = value.of if isinstance(value, Method) else value
        yield isinstance(owner, CallResult) and owner.call in calls


def _is_handed_on(program: Program, sampler: ast.Call, loaders: list[ast.Call]) -> bool:
    """Whether something that is not seen gets the sampler or its loader, and may call it."""
    trained = training_loops(program)
    nodes = [sampler, *loaders, *(loop for loader in loaders for loop in trained[loader])]
    for source in {program.source_of(node) for node in nodes}:
        for call in program.index(source).every(ast.Call):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            named = [value for value in arguments if isinstance(value, ast.Name | ast.Attribute)]
            is_given = any(
                any(_is_one_of(program.values(value), [sampler, *loaders])) for value in named
            )
            if is_given and _is_unseen(program, call):
                return True
    return False


_HARMLESS = {
    "enumerate",
    "len",
    "tqdm",
    "iter",
    "next",
    "zip",
    "islice",
    "print",
    "isinstance",
    "hasattr",
}


def _is_unseen(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    return (
        name != LOADER
        and name.rpartition(".")[2] not in _HARMLESS
        and not called_definitions(program, call)
    )
