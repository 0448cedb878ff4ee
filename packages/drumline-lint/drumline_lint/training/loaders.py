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
_DIVIDING = (f"{ACCELERATOR}.prepare", f"{FABRIC}.setup_dataloaders")
_WRAPPERS = (DDP, *FSDP, "drumline.DDPManager.wrap")
DEEPEST = 6
MOST_PIECES = 400


def given(loader: ast.Call, name: str) -> ast.expr | None:
    """What a DataLoader is given for a parameter."""
    return argument(loader, _PARAMETERS.index(name) if name in _PARAMETERS else None, name)


def loaders(program: Program, iterated: ast.expr | None, depth: int = 0) -> list[ast.Call]:
    """The DataLoader calls that an iterable may come from, through `enumerate`, `tqdm`, generators
    and their like.

    loader = DataLoader(dataset)
    for number, batch in enumerate(tqdm(loader)):
        ...
    """
    if depth >= DEEPEST:
        return []

    calls: list[ast.Call] = []
    for value in program.values(iterated):
        if not isinstance(value, CallResult):
            continue
        if value.name == LOADER:
            calls.append(value.call)
        elif value.name.rpartition(".")[2] in _AROUND:
            for part in value.call.args:
                calls += loaders(program, part, depth + 1)

    if calls:
        return calls

    for origin in written_values(program, iterated):
        if isinstance(origin, ast.Call):
            for passed_on in _passed_on_in(program, origin):
                calls += loaders(program, passed_on, depth + 1)

    return calls


def _passed_on_in(program: Program, call: ast.Call) -> list[ast.expr]:
    """What the generator that a call makes goes over: of a parameter, what this call gives, and not
    what other calls give.

    `train_loader` of `forever(train_loader)`, after `def forever(loader): yield from loader`.
    """
    function = program.function_of(call)
    if function is None or isinstance(function, ast.Lambda):
        return []
    if has_unknown_arguments(call):
        return passed_on_by(function)

    parameters = {parameter.arg: parameter for parameter in function.args.args}
    iterables: list[ast.expr] = []

    for passed_on in passed_on_by(function):
        iterated = program.iterated(passed_on)
        parameter = parameters.get(iterated.id) if isinstance(iterated, ast.Name) else None
        value = None
        if parameter is not None:
            value = argument(call, number_of(function, parameter), parameter.arg)
        iterables.append(value or passed_on)

    return iterables


def passed_on_by(function: FunctionNode) -> list[ast.expr]:
    """What a generator goes over: `for batch in loader: yield batch`, `yield from loader`."""
    loops = [loop for loop in nodes_in(function, ast.For) if nodes_in(loop, ast.Yield)]
    passing = nodes_in(function, ast.YieldFrom)
    return [*(loop.iter for loop in loops), *(each.value for each in passing)]


def stream_classes(program: Program, dataset: ast.expr | None) -> list[ast.ClassDef]:
    """The classes of a dataset that can only be iterated over."""
    values = program.values(dataset)
    classes = [value.of for value in values if isinstance(value, Instance)]
    return [made for made in classes if _is_stream(program, made)]


def _is_stream(program: Program, made: ast.ClassDef) -> bool:
    """`class Words(IterableDataset):`"""
    return any(str(base).endswith("IterableDataset") for base in program.ancestry(made))


# Loops that train.


@cached_query
def training_loops(program: Program) -> dict[ast.Call, list[Loop]]:
    """Of each DataLoader, the loops that train a distributed model on its batches."""
    loops: dict[ast.Call, list[Loop]] = defaultdict(list)

    for source in program.sources:
        for loop in batch_loops(program, source):
            if not trains_together(program, loop):
                continue
            for loader in set(_fed_by(program, loop)):
                loops[loader].append(loop)

    return loops


def _fed_by(program: Program, loop: Loop) -> Iterator[ast.Call]:
    """The DataLoader calls whose batches a loop takes: `for batch in loader`, `next(batches)`."""
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

    for call in calls_made_in(program, loop):
        if program.made(call.func, *_WRAPPERS) or program.name_of(call.func) in COLLECTIVES:
            return True

    return False


# Loaders and loops that divide the data.


def goes_over_part(program: Program, loop: Loop) -> bool:
    """Whether each rank goes over its own part of the data: all loaders of a loop divide it."""
    return isinstance(loop, ast.For) and is_part(program, loop.iter)


def is_part(program: Program, iterated: ast.expr) -> bool:
    """Whether a loop or a comprehension over it goes over a rank's own part of the data.

    Examples: a loader with a DistributedSampler, `accelerator.prepare(loader)`.
    """
    origins = written_values(program, program.iterated(iterated))
    makers = [program.name_of(origin.func) for origin in origins if isinstance(origin, ast.Call)]

    calls = loaders(program, iterated)
    if calls and all(is_divided_loader(program, call) for call in calls):
        return True

    return any(name in _DIVIDING for name in makers)


def is_divided_loader(program: Program, loader: ast.Call) -> bool:
    """Whether a loader has a DistributedSampler, or a subset that depends on the rank.

    Example: `DataLoader(Subset(data, range(rank, len(data), world_size)))`.
    """
    samplers = program.made(given(loader, "sampler"), DISTRIBUTED_SAMPLER)
    if samplers:
        return not any(_is_for_training_only(sampler.call) for sampler in samplers)

    for subset in written_values(program, given(loader, "dataset")):
        if not isinstance(subset, ast.Call) or called_name(subset) != "Subset":
            continue
        if any(depends_on_rank(program, part) for part in subset.args[1:]):
            return True

    return False


def _is_for_training_only(sampler: ast.Call) -> bool:
    """`DistributedSampler(data) if is_train else None`"""
    choice = parent_of(sampler)
    return isinstance(choice, ast.IfExp) and "train" in ast.unparse(choice.test)


def is_stripe(program: Program, node: ast.AST) -> bool:
    """Whether it takes every n-th item from this rank's number on.

    Examples: `files[rank::world_size]`, `range(rank, n, world_size)`,
    `islice(items, rank, None, world_size)`, `i % world_size == rank`.
    """
    first, step = _first_and_step(node)
    return step is not None and is_rank(program, first) and depends_on_rank(program, step)


def _first_and_step(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """The number of the first item that it takes, and the distance to the next: `a` and `b` of
    `items[a::b]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return node.slice.lower, node.slice.step

    if isinstance(node, ast.Call):
        if called_name(node) == "range" and len(node.args) == 3:
            return node.args[0], node.args[2]
        if called_name(node) == "islice" and len(node.args) == 4:
            return node.args[1], node.args[3]

    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        remainder = node.left
        if isinstance(remainder, ast.BinOp) and isinstance(remainder.op, ast.Mod):
            return node.comparators[0], remainder.right

    return None, None


# What data is made of.


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
                if dataset is not None and not given(loader, "sampler"):
                    pending.append(dataset)

    return list(every)


def _appended(name: ast.Name) -> list[ast.expr]:
    """What is appended to a list in its function: `x` of `results.append(x)`, for `results`."""
    calls = [call for call in calls_beside(name) if called_name(call) == "append" and call.args]
    return [call.args[0] for call in calls if dotted(call.func) == f"{name.id}.append"]


def is_of_part(program: Program, whole: ast.expr | None) -> bool:
    """Whether it comes from this rank's part of the data, and was not gathered."""
    origins = pieces(program, whole)
    if not _is_divided(program, origins):
        return False

    names = [called_name(origin) for origin in origins if isinstance(origin, ast.Call)]
    return not any("gather" in name or "reduce" in name for name in names)


def _is_divided(program: Program, origins: list[ast.expr]) -> bool:
    """Whether an origin takes a rank's items, or is a loader that divides the data."""
    if any(is_stripe(program, origin) for origin in origins):
        return True

    feeding = (loader for origin in origins for loader in loaders(program, origin))
    return any(is_divided_loader(program, loader) for loader in feeding)
