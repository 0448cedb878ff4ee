"""DL005: every epoch has the same order."""

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
from drumline_lint.program.tree import ancestors, called_name, calls_beside, enclosing_function
from drumline_lint.program.value import CallResult, ConstantValue, Instance, Method
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders, passed_on_by, training_loops

RULE = rule("DL005", in_tests=False)
_EVALUATION = re.compile(r"eval(uat(e|ion))?|val(id|ation)?|test(ing)?|dev")
_WORD = re.compile(r"[A-Z]?[a-z]+")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers that shuffle, in programs that train for epochs."""
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        if (
            framework(program, source)
            or not _shuffles(program, call)
            or _is_of_evaluation(source, call)
        ):
            continue
        if _is_of_epochs(program, call) and not _may_be_told(program, call):
            dataset = argument(call, 0, "dataset")
            of = "" if dataset is None else f" of {source.code(dataset)}"
            message = (
                f"the DistributedSampler{of} shuffles, but set_epoch is never called: "
                "every epoch has the same order"
            )
            is_mild = source.is_notebook or _is_of_one_epoch(program, call)
            severity = Severity.NOTE if is_mild else None
            once = _told_once(program, source, call)
            if once is not None:
                message = "set_epoch is called with one number only: every epoch has the same order"
            yield RULE.at(source, once or call, message, severity=severity)


def _told_once(program: Program, source: Source, sampler: ast.Call) -> ast.Call | None:
    """`sampler.set_epoch(0)`"""
    for call in program.index(source).calls.get("set_epoch", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_own = any(getattr(value, "call", None) is sampler for value in program.values(owner))
        if is_own and call.args and isinstance(call.args[0], ast.Constant):
            return call
    return None


def _is_of_one_epoch(program: Program, sampler: ast.Call) -> bool:
    """Whether all loops over epochs of its file make one round, unless a user asks for more."""
    index = program.index(program.source_of(sampler))
    heads = [(loop.iter, loop.target) for loop in index.every(ast.For)]
    heads += [(loop.test, loop.test) for loop in index.every(ast.While)]
    ends = [
        head.comparators[-1] if isinstance(head, ast.Compare) else head.args[-1]
        for head, target in heads
        if "epoch" in f"{ast.unparse(head)} {ast.unparse(target)}".lower()
        if isinstance(head, ast.Compare) or (isinstance(head, ast.Call) and head.args)
    ]
    return bool(ends) and all(is_one(program, end) for end in ends)


def _shuffles(program: Program, call: ast.Call) -> bool:
    shuffle = argument(call, 3, "shuffle")
    is_on = shuffle is None or ConstantValue(True) in program.values(shuffle)
    return is_on and not has_unknown_arguments(call)


def _is_of_evaluation(source: Source, call: ast.Call) -> bool:
    """By the names of the dataset, its function and its file: the order of an evaluation does not
    matter."""
    function = enclosing_function(call)
    dataset = argument(call, 0, "dataset")
    names = source.path.stem
    names += "" if dataset is None else f" {ast.unparse(dataset)}"
    names += "" if function is None else f" {function.name}"
    return any(_EVALUATION.fullmatch(word.lower()) for word in _WORD.findall(names))


def _is_of_epochs(program: Program, sampler: ast.Call) -> bool:
    """Whether a loop over epochs is around a loop over its loader, or around any loop that trains
    where its loader is made in the same function."""
    for loader, loops in training_loops(program).items():
        made = program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
        if any(value.call is sampler for value in made):
            is_repeated = any(any(outer_loops(program, loop)) for loop in loops)
            return is_repeated or loader in _repeated_loaders(program)
    calls = calls_beside(sampler)
    makers = [call for call in calls if program.name_of(call.func) == LOADER]
    if any(maker in training_loops(program) for maker in makers):
        return False  # others beside it train
    is_given = any(sampler in written_values(program, given(call, "sampler")) for call in makers)
    near = connected(program, program.source_of(sampler))
    return is_given and _trains_for_epochs(program, near)


@cached_query
def _repeated_loaders(program: Program) -> set[ast.Call]:
    """Those that a generator goes over again and again."""
    return {
        loader
        for source in program.sources
        if "yield" in source.text
        for function in program.index(source).every(ast.FunctionDef)
        for passed_on in passed_on_by(function)
        if any(isinstance(outer, ast.While) for outer in ancestors(passed_on))
        for loader in loaders(program, passed_on)
    }


@cached_query
def _trains_for_epochs(program: Program, sources: frozenset[Source]) -> bool:
    loops = [loop for source in sources for loop in batch_loops(program, source)]
    is_whole = any("DistributedDataParallel" in source.text for source in sources)
    is_whole = is_whole and not any(framework(program, source) for source in sources)
    return (
        is_whole
        and bool(loops)
        and all(
            any(
                isinstance(outer, ast.For) and "epoch" in ast.unparse(outer.iter).lower()
                for outer in outer_loops(program, loop)
            )
            for loop in loops
        )
    )


def _may_be_told(program: Program, sampler: ast.Call) -> bool:
    """Whether there is a `set_epoch` on something that may be it, or something unknown gets it."""
    if _is_handed_on(program, sampler):
        return True
    return any(
        not _is_another(program, call, sampler)
        for source in connected(program, program.source_of(sampler))
        if "set_epoch" in source.text
        for call in (*program.index(source).calls.get("set_epoch", ()), None)
    )


def _is_handed_on(program: Program, sampler: ast.Call) -> bool:
    return any(
        program.name_of(call.func) != LOADER
        and program.function_of(call) is None
        and any(program.made(value, DISTRIBUTED_SAMPLER) for value in call.args)
        for call in calls_beside(sampler)
        if called_name(call) not in ("len", "isinstance", "print")
    )


def _is_another(program: Program, call: ast.Call | None, sampler: ast.Call) -> bool:
    """Whether it is known to be called on another sampler, or with the same number each time."""
    if call is None:  # a text that only names it
        return True
    if call.args and isinstance(call.args[0], ast.Constant):
        return True
    owners = program.values(call.func.value) if isinstance(call.func, ast.Attribute) else ()
    if any(getattr(owner, "call", None) is sampler for owner in owners):
        return False
    for value in owners:
        owner = value.of if isinstance(value, Method) else value
        is_loader = isinstance(owner, CallResult) and owner.name == LOADER
        made = (
            program.made(given(owner.call, "sampler"), DISTRIBUTED_SAMPLER)
            if isinstance(owner, CallResult) and is_loader
            else [owner]
        )
        if isinstance(owner, Instance):
            return True
        if isinstance(owner, CallResult) and not owner.name.startswith("torch.utils.data."):
            return False  # `getattr(loader, "sampler", None)`
        if not made or any(getattr(part, "call", sampler) is sampler for part in made):
            return False
    return bool(owners)
