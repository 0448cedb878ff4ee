"""DL005: every epoch has the same order."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import batch_loops, outer_loops
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.origins import called_definitions, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    enclosing_function,
    last_name,
    nodes_in,
    scope_of,
    statement_of,
)
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
        is_same = (
            not _has_set_epoch(program, call, fed) and not _is_handed_on(program, call, fed)
            if fed
            else is_candidate and _is_of_epochs(program, call)
        )
        if is_same:
            dataset = argument(call, 0, "dataset")
            of = "" if dataset is None else f" of {source.code(dataset)}"
            message = (
                f"the DistributedSampler{of} shuffles, but set_epoch is never called: "
                "every epoch has the same order"
            )
            yield RULE.at(source, call, message)


def _is_of_epochs(program: Program, call: ast.Call) -> bool:
    """Whether its program trains for epochs and has no set_epoch at all, where the way from the sampler
    to the loop is not seen."""
    source = program.source_of(call)
    near = connected(program, source)
    if source.is_test or any("set_epoch" in file.text or framework(program, file) for file in near):
        return False
    is_whole = any("DistributedDataParallel" in file.text for file in near)
    trains_here = bool(batch_loops(program, source))
    files = frozenset({source}) if trains_here else near
    return is_whole and _is_given_to_loader(program, call) and _trains_for_epochs(program, files)


def _is_given_to_loader(program: Program, call: ast.Call) -> bool:
    """`kwargs["sampler"] = ...`, or a name that a loader of the same function gets."""
    statement = statement_of(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    function = enclosing_function(call)
    words = f"{ast.unparse(target) if target else ''}_{function.name if function else ''}".lower()
    if target is None or any(word in words for word in ("val", "test", "dev")):
        return False
    loaders = [inner for inner in nodes_in(scope_of(call), ast.Call) if _loads(program, inner)]
    samplers = [given(loader, "sampler") for loader in loaders]
    is_key = isinstance(target, ast.Subscript) and "'sampler'" in ast.unparse(target.slice)
    return is_key or any(
        sampler is not None and ast.unparse(sampler) == ast.unparse(target) for sampler in samplers
    )


def _loads(program: Program, call: ast.Call) -> bool:
    return program.name_of(call.func) == LOADER


@cached_query
def _trains_for_epochs(program: Program, sources: frozenset[Source]) -> bool:
    return any(
        isinstance(outer, ast.For) and "epoch" in ast.unparse(outer.iter).lower()
        for source in sources
        for loop in batch_loops(program, source)
        for outer in outer_loops(program, loop)
    )


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
