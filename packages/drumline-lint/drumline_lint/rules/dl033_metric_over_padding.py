"""DL033: samples that the sampler repeats are counted twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import distributed_sources, framework
from drumline_lint.flow.guards import is_on_main_only
from drumline_lint.flow.loops import calls_made_in, evaluation_loops
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import ACCELERATOR, COLLECTIVES, DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import Loop, ancestors, enclosing_function, last_name, nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import is_method, round_functions, training_loops

RULE = rule("DL033")
ADDING = ("append", "extend", "update", "add", "add_batch", "accumulate")
# Who names one of these knows of the padding.
HANDLING = set(
    "total_size gather_for_metrics num_samples Subset unpad padding is_padding valid_mask".split()
)
# What brings the parts of ranks together; `compute` of a metric does.
_JOINING = re.compile(r"reduce|gather|broadcast|(?<!no_)sync|across|collect|^compute$")
# Under whatever name a file has them.
_REDUCING = tuple(name for name in sorted(COLLECTIVES) if re.search(r"reduce|gather", name))
# Much there is named so and joins nothing: `torch.gather`, `functools.reduce`, `gc.collect`.
_OF_ONE_PROCESS = ("torch.", "numpy.", "einops.", "functools.", "gc.", "asyncio.")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The sampler of a loader that an evaluation goes over."""
    for sampler in _padding_samplers(program):
        if program.source_of(sampler) is source:
            yield RULE.at(
                source,
                sampler,
                f"{source.code(sampler.func)} repeats samples to give every rank as many, and the evaluation over them "
                "counts those twice",
            )
    yield from _gathered(program, source)


def _gathered(program: Program, source: Source) -> Iterator[Finding]:
    """`accelerator.gather` in an evaluation, which keeps what the last batch repeats."""
    calls = list(program.calls(source, f"{ACCELERATOR}.gather"))
    for loop in evaluation_loops(program, source) if calls else ():
        for call in calls:
            if loop in ancestors(call) and not _cuts(loop):
                message = f"{source.code(call.func)} keeps the samples that the last batch repeats"
                yield RULE.at(source, call, message, fix="call gather_for_metrics")


def _cuts(loop: Loop) -> bool:
    """Whether something is cut off: `predictions[: len(dataset) - seen]`."""
    return any(part.upper is not None for part in nodes_in(loop, ast.Slice))


@cached_query
def _padding_samplers(program: Program) -> dict[ast.Call, None]:
    padding: dict[ast.Call, None] = {}
    distributed = distributed_sources(program)
    trained = {sampler for loop in training_loops(program) for sampler in _samplers(program, loop)}
    for source in program.sources:
        if (
            source not in distributed
            or framework(program, source)
            or not _is_joined(program, source)
        ):
            continue
        for loop in evaluation_loops(program, source):
            every = [sampler for sampler in _samplers(program, loop) if sampler not in trained]
            samplers = [
                sampler
                for sampler in every
                if _pads(program, sampler) and not _is_for_training(program, sampler)
            ]
            if samplers and _counts(program, loop) and not is_on_main_only(program, loop):
                padding |= dict.fromkeys(
                    sampler for sampler in samplers if not _is_handled(program, loop, sampler)
                )
    return padding


def _is_joined(program: Program, source: Source) -> bool:
    """Whether results of ranks are brought together anywhere near: one's own part alone holds no
    sample twice."""
    near = connected(program, source)
    return any(
        _JOINING.search(last.lower()) and any(_may_join(program, call) for call in calls)
        for near_source in near
        for last, calls in program.index(near_source).calls.items()
    ) or not near.isdisjoint(_reducing_files(program))


@cached_query
def _reducing_files(program: Program) -> set[Source]:
    return {program.source_of(call) for call in program.all_calls(*_REDUCING)}


def _may_join(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    is_of_ranks = name.startswith("torch.distributed.") or not name.startswith(_OF_ONE_PROCESS)
    return is_of_ranks and not _takes_elements(call)


def _takes_elements(call: ast.Call) -> bool:
    """`logits.gather(1, labels)`, of a tensor: it begins with a dimension."""
    dimension = argument(call, 0, "dim")
    is_number = isinstance(dimension, ast.Constant | ast.UnaryOp)
    return last_name(call.func) == "gather" and is_number


def _samplers(program: Program, loop: Loop) -> list[ast.Call]:
    if isinstance(loop, ast.While):
        return []
    loaders = program.made(program.iterated(loop.iter), LOADER)
    samplers = [argument(made.call, 3, "sampler") for made in loaders]
    return [
        made.call for sampler in samplers for made in program.made(sampler, DISTRIBUTED_SAMPLER)
    ]


def _pads(program: Program, sampler: ast.Call) -> bool:
    drop_last = argument(sampler, 5, "drop_last")
    is_told_not_to = drop_last is not None and program.values(drop_last) != {ConstantValue(False)}
    return not is_told_not_to and not has_unknown_arguments(sampler)


def _is_for_training(program: Program, sampler: ast.Call) -> bool:
    """Under `if training:` or `if split == "train":`."""
    return any(holds and _says_training(test) for test, holds in conditions(program, sampler))


def _says_training(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(
            _says_training(operand) for operand in test.values
        )
    if isinstance(test, ast.Compare):
        right = test.comparators[0]
        is_equal = isinstance(test.ops[0], ast.Eq)
        return is_equal and isinstance(right, ast.Constant) and "train" in str(right.value).lower()
    name = last_name(test).lower()
    return name.removeprefix("is_").removeprefix("for_") in ("train", "training")


def _counts(program: Program, loop: Loop) -> bool:
    if any(
        isinstance(statement.op, ast.Add)
        for root in round_functions(program, loop)
        for statement in nodes_in(root, ast.AugAssign)
    ):
        return True
    return any(is_method(call, *ADDING) for call in calls_made_in(program, loop))


def _is_handled(program: Program, loop: Loop, sampler: ast.Call) -> bool:
    """Whether the code around says that it knows: a remainder by the number of ranks, a cut, a part
    for the rest."""
    if any(map(_is_put_by_index, nodes_in(loop, ast.Assign))):
        return True
    for node in (loop, sampler):
        around = enclosing_function(node) or program.source_of(node).tree
        for part in nodes_in(around, ast.Name, ast.Attribute, ast.BinOp, ast.Slice):
            if isinstance(part, ast.BinOp):
                if isinstance(part.op, ast.Mod) and _names_ranks(part.right):
                    return True
            elif isinstance(part, ast.Slice):
                if part.upper is not None and any(
                    last_name(c.func) == "len" for c in nodes_in(part.upper, ast.Call)
                ):
                    return True
            elif last_name(part) in HANDLING:
                return True
    return False


def _is_put_by_index(statement: ast.Assign) -> bool:
    """`features[idx] = ...`: a sample that comes twice is put in the same place."""
    target = statement.targets[0]
    index = target.slice if isinstance(target, ast.Subscript) else None
    words = [] if index is None else last_name(index).lower().split("_")
    return not {"idx", "idxs", "index", "indexes", "indices", "ids"}.isdisjoint(words)


def _names_ranks(expression: ast.expr) -> bool:
    words = [last_name(name).lower() for name in nodes_in(expression, ast.Name, ast.Attribute)]
    return any("world" in word or "replicas" in word or "ranks" in word for word in words)
