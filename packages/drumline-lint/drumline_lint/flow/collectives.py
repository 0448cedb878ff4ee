"""Collective calls, the calls that lead to them, and whether other ranks make the same call
elsewhere."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.flow.conditions import conditions, rank_tests, rank_tests_at
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import says_distributed
from drumline_lint.flow.sharded_states import has_sharded_states
from drumline_lint.program.calls import argument
from drumline_lint.program.names import (
    ACCELERATOR,
    COLLECTIVE_SAVES,
    COLLECTIVES,
    DEEPSPEED,
    FABRIC,
    FSDP,
)
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    FunctionNode,
    ScopeNode,
    called_name,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    owner_of,
    scope_of,
)
from drumline_lint.program.value import CallResult, ConstantValue, Library, RankTest

DEEPEST = 2
"""How many calls are followed to a collective."""

# It reports which rank is missing, so whoever uses it does so on purpose.
_LEFT_OUT = {"torch.distributed.monitored_barrier"}

_OF_FRAMEWORKS = {
    *(
        f"{ACCELERATOR}.{name}"
        for name in "wait_for_everyone gather gather_for_metrics reduce pad_across_processes".split()
    ),
    *(f"{FABRIC}.{name}" for name in "barrier all_gather all_reduce broadcast save load".split()),
    f"{ACCELERATOR}.save_state",
    f"{ACCELERATOR}.load_state",
    f"{ACCELERATOR}.get_state_dict",
    "pytorch_lightning.LightningModule.all_gather",
    "pytorch_lightning.LightningModule.log",
    *(
        f"pytorch_lightning.Trainer.{name}"
        for name in "fit validate test predict save_checkpoint".split()
    ),
    *(
        f"transformers.{trainer}.{name}"
        for trainer in ("Trainer", "Seq2SeqTrainer")
        for name in ("train", "evaluate", "predict")
    ),
    f"{DEEPSPEED}.save_checkpoint",
    f"{DEEPSPEED}.save_16bit_model",
    f"{DEEPSPEED}.load_checkpoint",
}
_OF_SHARDED_STATES = tuple(
    f"{ACCELERATOR}.{name}" for name in ("save_state", "load_state", "get_state_dict")
)
_OF_SHARDS = "torch.distributed.checkpoint.state_dict."
ALL = (COLLECTIVES | COLLECTIVE_SAVES | _OF_FRAMEWORKS) - _LEFT_OUT
_LASTS = frozenset(name.rpartition(".")[2] for name in ALL)


def collective(program: Program, call: ast.Call) -> str:
    """The name of the collective that is called; empty if there is none, or only for a group of
    some ranks.

    `torch.distributed.all_reduce` of `dist.all_reduce(loss)`.
    """
    name = program.name_of(call.func) or _of_engine(program, call)
    if name not in ALL or has_group(program, call):
        return ""

    if name.endswith("save_pretrained") and argument(call, None, "state_dict") is not None:
        return ""  # the state was gathered before
    if name.startswith(_OF_SHARDS) and not _has_shards(program):
        return ""

    return name if _reaches_others(program, call, name) else ""


def _reaches_others(program: Program, call: ast.Call, name: str) -> bool:
    """Whether a framework's method waits for other ranks here: by an argument of it, or by how its
    object was made.

    Examples: `self.log("loss", loss, sync_dist=True)`, `Trainer(devices=8).fit(model)`.
    """
    if name.endswith("LightningModule.log"):
        is_for_main = ConstantValue(True) in program.values(argument(call, None, "rank_zero_only"))
        is_reduced = program.values(argument(call, None, "sync_dist")) == {ConstantValue(True)}
        return is_reduced and not is_for_main

    if name in _OF_SHARDED_STATES:
        return has_sharded_states(program, call)

    if name.startswith("pytorch_lightning.Trainer."):
        trainers = program.values(owner_of(call))
        makers = [trainer.call for trainer in trainers if isinstance(trainer, CallResult)]
        return not any(_is_of_one(program, maker) for maker in makers)

    return True


def _is_of_one(program: Program, trainer: ast.Call) -> bool:
    """`Trainer(devices=1)`, or one that is made where only some ranks come."""
    devices = program.values(argument(trainer, None, "devices"))
    return devices == {ConstantValue(1)} or any(rank_tests_at(program, trainer))


def _of_engine(program: Program, call: ast.Call) -> str:
    """The name of a method whose object only its origin or its place shows.

    Examples: `engine.save_checkpoint` of what deepspeed.initialize returned, and
    `trainer.save_checkpoint` in a hook of Lightning.
    """
    owner = owner_of(call)
    method = called_name(call)
    if owner is None or f"{DEEPSPEED}.{method}" not in _OF_FRAMEWORKS:
        return ""

    for origin in written_values(program, owner):
        if isinstance(origin, ast.Call) and program.name_of(origin.func) == DEEPSPEED:
            return f"{DEEPSPEED}.{method}"

    is_hook = "lightning" in framework(program, program.source_of(call))
    if is_hook and last_name(owner) == "trainer":
        return f"pytorch_lightning.Trainer.{method}"
    return ""


def _has_shards(program: Program) -> bool:
    """Whether a model is sharded over ranks; otherwise each rank has the complete state."""
    names = (*FSDP, "torch.distributed.tensor.parallel.parallelize_module")
    return next(program.all_calls(*names), None) is not None


def has_group(program: Program, call: ast.Call) -> bool:
    """Whether the call names the participants.

    Examples: `dist.barrier(group=workers)`, `dist.all_reduce(loss, dist.ReduceOp.SUM, workers)`.
    """
    groups = [
        keyword.value
        for keyword in call.keywords
        if keyword.arg is None or "group" in keyword.arg or keyword.arg == "no_dist"
    ]
    if any(not _is_world(program, value) for value in groups):
        return True

    return any(_is_group(program, value) for value in call.args)


_WORLDS = [
    {Library("torch.distributed.GroupMember.WORLD")},
    {Library("torch.distributed.group.WORLD")},
]


def _is_world(program: Program, value: ast.expr) -> bool:
    """Whether it is the group of all ranks: `dist.group.WORLD`, `None`."""
    values = program.values(value)
    if values == {ConstantValue(None)}:  # or None at first, and later something unknown
        return all(isinstance(origin, ast.Constant) for origin in written_values(program, value))

    return values in _WORLDS


def _is_group(program: Program, value: ast.expr) -> bool:
    """Whether it is a group of some ranks: what `dist.new_group` returned, or `dp_group` by its
    name."""
    if _is_world(program, value):
        return False

    for result in program.values(value):
        if isinstance(result, CallResult) and "new_" in result.name:
            return True

    name = last_name(value).lower()
    return name.endswith("group") or not {"group", "pg", "mesh"}.isdisjoint(name.split("_"))


# Collectives in a function, and in those that it calls.


def collectives_in(
    program: Program, node: ast.AST, depth: int = 0
) -> Iterator[tuple[str, tuple[ast.Call, ...]]]:
    """All collectives that are called in it, with the chain of calls: the last is the collective
    itself. Of a function that is called, those that it calls under no condition.

    def mean(loss):
        dist.all_reduce(loss)

    mean(loss)  # `torch.distributed.all_reduce`, by this call and the one above
    """
    likely = likely_collective_names(program)

    for call in nodes_in(node, ast.Call):
        if called_name(call) not in likely or (depth and _may_be_left_out(program, call)):
            continue

        if name := collective(program, call):
            yield name, (call,)
        elif depth < DEEPEST and not has_group(program, call):
            function = _callee(program, call)
            if function is None:
                continue
            for inner, chain in collectives_of(program, function, depth):
                yield inner, (call, *chain)


def _callee(program: Program, call: ast.Call) -> FunctionNode | None:
    """The function that a call runs; for an unknown object, the only method of its name:
    `self.meters[name].synchronize_between_processes()`."""
    function = program.function_of(call)
    name = called_name(call)
    if function is not None or owner_of(call) is None or "_" not in name.strip("_"):
        return function

    methods = _methods_by_name(program)[name]
    return methods[0] if len(methods) == 1 and not program.values(call.func) else None


@cached_query
def _methods_by_name(program: Program) -> dict[str, list[FunctionNode]]:
    """The methods of all classes of the program."""
    methods: dict[str, list[FunctionNode]] = defaultdict(list)

    for source in program.sources:
        for function in program.index(source).every(ast.FunctionDef):
            if enclosing_class(function) is not None:
                methods[function.name].append(function)

    return methods


@cached_query
def collectives_of(
    program: Program, function: FunctionNode, depth: int
) -> list[tuple[str, tuple[ast.Call, ...]]]:
    """The collectives that a function calls, the first of each name."""
    chains: dict[str, tuple[ast.Call, ...]] = {}
    for name, chain in collectives_in(program, function, depth + 1):
        chains.setdefault(name, chain)

    return list(chains.items())


def _may_be_left_out(program: Program, call: ast.Call) -> bool:
    """Whether a condition decides that is not known from here; that there are several processes
    is."""
    return any(
        says_distributed(program, test) is not holds for test, holds in conditions(program, call)
    )


@cached_query
def likely_collective_names(program: Program) -> set[str]:
    """The names of functions that may call a collective, so that only few calls need a closer
    check."""
    likely = set(_LASTS)
    callers = _names_of_callers(program)
    pending = list(likely)

    while pending:
        new = callers[pending.pop()] - likely - {""}
        likely |= new
        pending += new

    return likely


def _names_of_callers(program: Program) -> dict[str, set[str]]:
    """By the name of a function, what it is imported as, and what calls it.

    For `reduce`: `r` of `from distributed import reduce as r`, and `mean` of
    `def mean(loss): return reduce(loss)`.
    """
    callers: dict[str, set[str]] = defaultdict(set)

    for source in program.sources:
        index = program.index(source)

        for scope in index.scopes.values():
            for name, bindings in scope.names.items():
                for binding in bindings:
                    if binding.imported:
                        callers[short_name(binding.imported)].add(name)

        for called, calls in index.calls.items():
            callers[called].update(map(_name_around, {scope_of(call) for call in calls}))

    return callers


def _name_around(scope: ScopeNode) -> str:
    """The name of the enclosing function, or of the class for `__init__`."""
    function = enclosing_function(scope)
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = scope
    if function is None:
        return ""

    owner = enclosing_class(function) if function.name == "__init__" else None
    return function.name if owner is None else owner.name


def short_name(name: str) -> str:
    """`barrier` of `torch.distributed.barrier`."""
    return name.rpartition(".")[2]


# The ranks that call one.


def has_counterpart(program: Program, call: ast.Call, name: str) -> bool:
    """Whether the ranks that a condition keeps away call the same elsewhere in the function.

    if rank == 0:
        dist.broadcast(tensor, 0)
    else:
        dist.broadcast(tensor, 0)
    """
    function = enclosing_function(call) or program.source_of(call).tree
    written = _written(program, call)

    for called, chain in collectives_in(program, function):
        if called != name or chain[0] is call or not any(rank_tests_at(program, chain[0])):
            continue
        if _written(program, chain[0]) != written:
            return True

    return False


def _written(program: Program, node: ast.AST) -> list[tuple[str, bool]]:
    """The conditions on ranks around it, as text, to compare them."""
    held = conditions(program, node)
    return [(ast.dump(test), holds) for test, holds in held if rank_tests(program, test)]


def who_calls(test: RankTest) -> str:
    """The ranks that a condition lets through, for a message."""
    if test.is_main is None:
        return "only some ranks call"
    if not test.is_main:
        return "all ranks but one call"

    return "only one process of each node calls" if test.kind == "local" else "only rank 0 calls"
