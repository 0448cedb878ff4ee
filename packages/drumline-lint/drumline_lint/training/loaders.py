"""Which loader feeds which loop: the DataLoader calls behind what is iterated over, and what is
given to them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.flow.loops import batch_loops, calls_in, calls_made_in
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.names import (
    ACCELERATOR,
    COLLECTIVES,
    DDP,
    DISTRIBUTED_SAMPLER,
    FABRIC,
    FSDP,
    LOADER,
)
from drumline_lint.program.origins import depends_on_rank, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    Loop,
    ancestors,
    enclosing_class,
    enclosing_function,
    last_name,
)
from drumline_lint.program.value import CallResult, Instance, LoopItem

# The parameters of a DataLoader that can be given by position, in order.
_PARAMETERS = tuple(
    "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last".split()
)
_AROUND = {"cycle", "enumerate", "islice", "iter", "next", "track", "tqdm", "trange", "zip"}
_VIEWS = {"items", "values"}
WRAPPERS = (DDP, *FSDP, "drumline.DDPManager.wrap")
DEEPEST = 6


def given(loader: ast.Call, name: str) -> ast.expr | None:
    """What a DataLoader is given for a parameter."""
    return argument(loader, _PARAMETERS.index(name) if name in _PARAMETERS else None, name)


def loaders(program: Program, iterated: ast.expr | None, depth: int = 0) -> list[ast.Call]:
    """The DataLoader calls that an iterable may come from, through `enumerate`, `tqdm` and their
    like."""
    calls = []
    for value in program.values(iterated) if depth < DEEPEST else ():
        if not isinstance(value, CallResult):
            continue
        if value.name == LOADER:
            calls.append(value.call)
        elif value.name.rpartition(".")[2] in _AROUND:
            calls += [
                loader for part in value.call.args for loader in loaders(program, part, depth + 1)
            ]
    return calls


def loaders_behind(program: Program, part: ast.expr, depth: int = 0) -> list[ast.Call]:
    """The DataLoader calls whose batches this may be, or be a part of."""
    calls = []
    for value in program.values(part) if depth < DEEPEST else ():
        if isinstance(value, LoopItem):
            calls += loaders(program, value.of) or loaders_behind(
                program, _viewed(value.of), depth + 1
            )
        elif isinstance(value, CallResult) and value.name == "next" and value.call.args:
            calls += loaders(program, value.call.args[0])
    return calls


def _viewed(expression: ast.expr) -> ast.expr:
    """What is behind `batch.items()`."""
    if isinstance(expression, ast.Call) and last_name(expression.func) in _VIEWS:
        assert isinstance(expression.func, (ast.Name, ast.Attribute))
        return expression.func.value if isinstance(expression.func, ast.Attribute) else expression
    return expression


@cached_query
def training_loops(program: Program) -> dict[ast.Call, list[Loop]]:
    """Of each DataLoader, the loops that train a distributed model on its batches."""
    loops: dict[ast.Call, list[Loop]] = defaultdict(list)
    for source in program.sources:
        for loop in batch_loops(program, source):
            if trains_together(program, loop):
                for loader in set(_fed_by(program, loop)):
                    loops[loader].append(loop)
    return loops


def _fed_by(program: Program, loop: Loop) -> Iterator[ast.Call]:
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        yield from loaders(program, loop.iter)
    for call in calls_made_in(program, loop):
        if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args:
            of_other_instances = _given_to_others(program, loop, call)
            yield from (
                loader
                for loader in loaders(program, call.args[0])
                if loader not in of_other_instances
            )


def _given_to_others(program: Program, loop: Loop, call: ast.Call) -> set[ast.Call]:
    """Loaders that only other instances of the class got in whose method the call is: a second
    prefetcher's."""
    function = enclosing_function(call)
    owner = None if function is None else enclosing_class(function)
    made = None if owner is None else program.method(owner, "__init__")
    if owner is None or made is None or owner in ancestors(loop):
        return set()
    used = [
        inner_call.func.value
        for inner_call in calls_in(loop)
        if isinstance(inner_call.func, ast.Attribute)
    ]
    instances = [
        origin
        for instance in used
        if Instance(owner) in program.values(instance)
        for origin in written_values(program, instance)
    ]
    if not instances or not all(isinstance(instance, ast.Call) for instance in instances):
        return set()
    arguments = {
        caller: [*caller.args, *(keyword.value for keyword in caller.keywords)]
        for caller in program.callers(made)
    }
    by_instance = {
        instance: {loader for part in parts for loader in loaders(program, part)}
        for instance, parts in arguments.items()
    }
    of_instances = set().union(
        *(loaders for instance, loaders in by_instance.items() if instance in instances)
    )
    return set().union(*by_instance.values()) - of_instances


def trains_together(program: Program, loop: ast.AST) -> bool:
    """Whether a model that keeps in step with others is called in it, or gradients are exchanged by
    hand."""
    for call in calls_made_in(program, loop):
        for value in program.values(call.func):
            if isinstance(value, CallResult) and value.name in WRAPPERS:
                return True
        if program.name_of(call.func) in COLLECTIVES:
            return True
    home = connected(program, program.source_of(loop))
    return any(next(program.calls(source, *FSDP[1:]), None) is not None for source in home)


def goes_over_part(program: Program, loop: Loop) -> bool:
    """Whether each rank goes over its own part of the data: all loaders of a loop divide it."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return False
    origins = written_values(program, program.iterated(loop.iter))
    if any(isinstance(origin, ast.Call) and _prepares(program, origin) for origin in origins):
        return True
    calls = loaders(program, loop.iter)
    return bool(calls) and all(_is_divided(program, call) for call in calls)


def _prepares(program: Program, call: ast.Call) -> bool:
    """Whether a framework divides the loaders that it is given."""
    return program.name_of(call.func) in (f"{ACCELERATOR}.prepare", f"{FABRIC}.setup_dataloaders")


def _is_divided(program: Program, loader: ast.Call) -> bool:
    """By a DistributedSampler, or by a subset that depends on the rank."""
    samplers = written_values(program, given(loader, "sampler"))
    if any(
        isinstance(sampler, ast.Call) and program.name_of(sampler.func) == DISTRIBUTED_SAMPLER
        for sampler in samplers
    ):
        return True
    subsets = [
        subset
        for subset in written_values(program, given(loader, "dataset"))
        if isinstance(subset, ast.Call) and last_name(subset.func) == "Subset"
    ]
    return any(depends_on_rank(program, part) for subset in subsets for part in subset.args[1:])
