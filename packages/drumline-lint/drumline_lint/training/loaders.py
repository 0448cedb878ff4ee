"""Which loader feeds which loop: the DataLoader calls behind what is iterated over, and what is
given to them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument
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
from drumline_lint.program.tree import Loop, called_name
from drumline_lint.program.value import CallResult

# The parameters of a DataLoader that can be given by position, in order.
_PARAMETERS = tuple(
    "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last".split()
)
_AROUND = {"cycle", "enumerate", "islice", "iter", "next", "track", "tqdm", "trange", "zip"}
_WRAPPERS = (DDP, *FSDP, "drumline.DDPManager.wrap")
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
            parts = value.call.args
            calls += [loader for part in parts for loader in loaders(program, part, depth + 1)]
    return calls


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
    if isinstance(loop, ast.For):
        yield from loaders(program, loop.iter)
    for call in calls_made_in(program, loop):
        if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args:
            yield from loaders(program, call.args[0])


def trains_together(program: Program, loop: ast.AST) -> bool:
    """Whether a model that keeps in step with others is called in it, or gradients are exchanged by
    hand."""
    if next(program.calls(program.source_of(loop), *FSDP[1:]), None) is not None:
        return True
    calls = calls_made_in(program, loop)
    return any(
        program.made(call.func, *_WRAPPERS) or program.name_of(call.func) in COLLECTIVES
        for call in calls
    )


def goes_over_part(program: Program, loop: Loop) -> bool:
    """Whether each rank goes over its own part of the data: all loaders of a loop divide it."""
    if not isinstance(loop, ast.For):
        return False
    origins = written_values(program, program.iterated(loop.iter))
    preparing = (f"{ACCELERATOR}.prepare", f"{FABRIC}.setup_dataloaders")
    makers = [program.name_of(origin.func) for origin in origins if isinstance(origin, ast.Call)]
    calls = loaders(program, loop.iter)
    is_divided = bool(calls) and all(_is_divided(program, call) for call in calls)
    return is_divided or any(name in preparing for name in makers)


def _is_divided(program: Program, loader: ast.Call) -> bool:
    """By a DistributedSampler, or by a subset that depends on the rank."""
    if program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER):
        return True
    subsets = [
        subset
        for subset in written_values(program, given(loader, "dataset"))
        if isinstance(subset, ast.Call) and called_name(subset) == "Subset"
    ]
    return any(depends_on_rank(program, part) for subset in subsets for part in subset.args[1:])
