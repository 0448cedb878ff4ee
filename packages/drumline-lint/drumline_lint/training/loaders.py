"""Which loader feeds which loop: the DataLoader calls behind what is iterated over, and what is
given to them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator

from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments, number_of
from drumline_lint.program.names import (
    ACCELERATOR,
    COLLECTIVES,
    DDP,
    DISTRIBUTED_SAMPLER,
    FABRIC,
    FSDP,
    LOADER,
)
from drumline_lint.program.origins import (
    depends_on_rank,
    is_rank,
    parts,
    written_values,
)
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    FunctionNode,
    Loop,
    called_name,
    calls_beside,
    dotted,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import CallResult, Instance

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
            arguments = value.call.args
            calls += [loader for part in arguments for loader in loaders(program, part, depth + 1)]
    origins = [] if calls or depth >= DEEPEST else written_values(program, iterated)
    for origin in origins:
        for passed_on in _passed_on_in(program, origin) if isinstance(origin, ast.Call) else ():
            calls += loaders(program, passed_on, depth + 1)
    return calls


def _passed_on_in(program: Program, call: ast.Call) -> list[ast.expr]:
    """What the generator that a call makes goes over: of a parameter, what this call gives, and not
    what other calls give."""
    function = program.function_of(call)
    if function is None or isinstance(function, ast.Lambda):
        return []
    if has_unknown_arguments(call):
        return passed_on_by(function)
    parameters = {parameter.arg: parameter for parameter in function.args.args}
    every = []
    for passed_on in passed_on_by(function):
        iterated = program.iterated(passed_on)
        parameter = parameters.get(iterated.id) if isinstance(iterated, ast.Name) else None
        argument_given = (
            argument(call, number_of(function, parameter), parameter.arg) if parameter else None
        )
        every.append(argument_given or passed_on)
    return every


def passed_on_by(function: FunctionNode) -> list[ast.expr]:
    """What a generator goes over: `for batch in loader: yield batch`, `yield from loader`."""
    loops = [loop for loop in nodes_in(function, ast.For) if nodes_in(loop, ast.Yield)]
    return [
        *(loop.iter for loop in loops),
        *(passing.value for passing in nodes_in(function, ast.YieldFrom)),
    ]


def stream_classes(program: Program, dataset: ast.expr | None) -> list[ast.ClassDef]:
    """The classes of a dataset that can only be iterated over."""
    classes = [value.of for value in program.values(dataset) if isinstance(value, Instance)]
    return [
        owner
        for owner in classes
        if any(str(base).endswith("IterableDataset") for base in program.ancestry(owner))
    ]


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
    return isinstance(loop, ast.For) and is_part(program, loop.iter)


def is_part(program: Program, iterated: ast.expr) -> bool:
    """Whether a loop or a comprehension over it goes over a rank's own part of the data."""
    origins = written_values(program, program.iterated(iterated))
    preparing = (f"{ACCELERATOR}.prepare", f"{FABRIC}.setup_dataloaders")
    makers = [program.name_of(origin.func) for origin in origins if isinstance(origin, ast.Call)]
    calls = loaders(program, iterated)
    is_divided = bool(calls) and all(is_divided_loader(program, call) for call in calls)
    return is_divided or any(name in preparing for name in makers)


def is_divided_loader(program: Program, loader: ast.Call) -> bool:
    """By a DistributedSampler, or by a subset that depends on the rank."""
    samplers = program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
    if samplers:
        return not any(_is_for_training_only(sampler.call) for sampler in samplers)
    subsets = [
        subset
        for subset in written_values(program, given(loader, "dataset"))
        if isinstance(subset, ast.Call) and called_name(subset) == "Subset"
    ]
    return any(depends_on_rank(program, part) for subset in subsets for part in subset.args[1:])


def _is_for_training_only(sampler: ast.Call) -> bool:
    """`DistributedSampler(data) if is_train else None`"""
    choice = parent_of(sampler)
    return isinstance(choice, ast.IfExp) and "train" in ast.unparse(choice.test)


def is_stripe(program: Program, node: ast.AST) -> bool:
    """Whether it takes every n-th item from this rank's number on: `files[rank::world_size]`,
    `range(rank, n, world_size)`, `islice(items, rank, None, world_size)`, `i % world_size == rank`."""
    first: ast.expr | None = None
    step: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        first = node.slice.lower
        step = node.slice.step
    elif isinstance(node, ast.Call) and called_name(node) == "range" and len(node.args) == 3:
        first = node.args[0]
        step = node.args[2]
    elif isinstance(node, ast.Call) and called_name(node) == "islice" and len(node.args) == 4:
        first = node.args[1]
        step = node.args[3]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        remainder = node.left
        is_remainder = isinstance(remainder, ast.BinOp) and isinstance(remainder.op, ast.Mod)
        first = node.comparators[0]
        step = remainder.right if isinstance(remainder, ast.BinOp) and is_remainder else None
    return step is not None and is_rank(program, first) and depends_on_rank(program, step)


MOST_PIECES = 400


def pieces(
    program: Program,
    whole: ast.expr | None,
    is_end: Callable[[ast.expr], bool] | None = None,
) -> list[ast.expr]:
    """What something is made of, with what is appended to its lists, and the data of its loaders,
    but for what is behind an end."""
    every: dict[ast.expr, None] = {}
    pending = [] if whole is None else [whole]
    while pending and len(every) < MOST_PIECES:
        for part in parts(program, pending.pop(), is_end):
            if part in every:
                continue
            every[part] = None
            if isinstance(part, ast.Name):
                pending += _appended(part)
            for loader in loaders(program, part):
                dataset = given(loader, "dataset")
                pending += [] if dataset is None or given(loader, "sampler") else [dataset]
    return list(every)


def _appended(name: ast.Name) -> list[ast.expr]:
    calls = [call for call in calls_beside(name) if called_name(call) == "append" and call.args]
    return [call.args[0] for call in calls if dotted(call.func) == f"{name.id}.append"]


def is_of_part(program: Program, whole: ast.expr | None) -> bool:
    """Whether it comes from this rank's part of the data, and was not gathered."""
    origins = pieces(program, whole)
    names = [called_name(origin) for origin in origins if isinstance(origin, ast.Call)]
    is_divided = any(is_stripe(program, origin) for origin in origins) or any(
        is_divided_loader(program, loader)
        for origin in origins
        for loader in loaders(program, origin)
    )
    return is_divided and not any("gather" in name or "reduce" in name for name in names)
