"""Which loader feeds which loop: the DataLoader calls behind what is iterated over, and what is
given to them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.flow.loops import batch_loops, calls_in, calls_made_in
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.names import COLLECTIVES, DDP, FSDP, LOADER
from drumline_lint.program.origins import written_values
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
    found = []
    for value in program.values(iterated) if depth < DEEPEST else ():
        if not isinstance(value, CallResult):
            continue
        if value.name == LOADER:
            found.append(value.call)
        elif value.name.rpartition(".")[2] in _AROUND:
            found += [one for part in value.call.args for one in loaders(program, part, depth + 1)]
    return found


def loaders_behind(program: Program, part: ast.expr, depth: int = 0) -> list[ast.Call]:
    """The DataLoader calls whose batches this may be, or be a part of."""
    found = []
    for value in program.values(part) if depth < DEEPEST else ():
        if isinstance(value, LoopItem):
            found += loaders(program, value.of) or loaders_behind(
                program, _viewed(value.of), depth + 1
            )
        elif isinstance(value, CallResult) and value.name == "next" and value.call.args:
            found += loaders(program, value.call.args[0])
    return found


def _viewed(expression: ast.expr) -> ast.expr:
    """What is behind `batch.items()`."""
    if isinstance(expression, ast.Call) and last_name(expression.func) in _VIEWS:
        assert isinstance(expression.func, ast.Name | ast.Attribute)
        return expression.func.value if isinstance(expression.func, ast.Attribute) else expression
    return expression


@cached_query
def training_loops(program: Program) -> dict[ast.Call, list[Loop]]:
    """Of each DataLoader, the loops that train a distributed model on its batches."""
    found: dict[ast.Call, list[Loop]] = defaultdict(list)
    for source in program.sources:
        for loop in batch_loops(program, source):
            if trains_together(program, loop):
                for loader in set(_fed_by(program, loop)):
                    found[loader].append(loop)
    return found


def _fed_by(program: Program, loop: Loop) -> Iterator[ast.Call]:
    if isinstance(loop, ast.For | ast.AsyncFor):
        yield from loaders(program, loop.iter)
    for call in calls_made_in(program, loop):
        if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args:
            others = _given_to_others(program, loop, call)
            yield from (one for one in loaders(program, call.args[0]) if one not in others)


def _given_to_others(program: Program, loop: Loop, call: ast.Call) -> set[ast.Call]:
    """Loaders that only other instances of the class got in whose method the call is: a second
    prefetcher's."""
    function = enclosing_function(call)
    owner = None if function is None else enclosing_class(function)
    made = None if owner is None else program.method(owner, "__init__")
    if owner is None or made is None or owner in ancestors(loop):
        return set()
    used = [one.func.value for one in calls_in(loop) if isinstance(one.func, ast.Attribute)]
    own = [
        origin
        for one in used
        if Instance(owner) in program.values(one)
        for origin in written_values(program, one)
    ]
    if not own or not all(isinstance(one, ast.Call) for one in own):
        return set()
    arguments = {
        one: [*one.args, *(keyword.value for keyword in one.keywords)]
        for one in program.callers(made)
    }
    given = {
        one: {loader for part in parts for loader in loaders(program, part)}
        for one, parts in arguments.items()
    }
    mine = set().union(*(loaders for one, loaders in given.items() if one in own))
    return set().union(*given.values()) - mine


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
