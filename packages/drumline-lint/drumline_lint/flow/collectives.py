"""Collective calls, the calls that lead to them, and whether other ranks make the same call
elsewhere."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from drumline_lint.flow.call_values import CallFrame, is_on_parameter, truth
from drumline_lint.flow.conditions import (
    conditions,
    rank_tests,
    rank_tests_at,
    rest_of_block,
    split_condition,
)
from drumline_lint.flow.distributed import framework
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
from drumline_lint.program.queries import cached_query, recursive_query
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import (
    FunctionNode,
    ScopeNode,
    ancestors,
    branches_of,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    scope_of,
)
from drumline_lint.program.value import CallResult, ConstantValue, Library, RankTest
from drumline_lint.reading.source import Source

DEEPEST = 20
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
_OF_SHARDS = "torch.distributed.checkpoint.state_dict."
ALL = (COLLECTIVES | COLLECTIVE_SAVES | _OF_FRAMEWORKS) - _LEFT_OUT
_LASTS = frozenset(name.rpartition(".")[2] for name in ALL)


def collective(program: Program, call: ast.Call) -> str:
    """The name of the collective that is called; empty if there is none, or only for a group of
    some ranks."""
    name = program.name_of(call.func) or _of_engine(program, call)
    if name not in ALL or has_group(program, call):
        return ""
    if name.endswith("save_pretrained") and argument(call, None, "state_dict") is not None:
        return ""  # the state was gathered before
    if name.startswith(_OF_SHARDS) and not _has_shards(program):
        return ""
    return name if _reaches_others(program, call, name) else ""


_OF_SHARDED_STATES = (f"{ACCELERATOR}.save_state", f"{ACCELERATOR}.load_state")
_PLUGINS = tuple(
    f"accelerate.{place}{name}Plugin"
    for place in ("", "utils.")
    for name in ("DeepSpeed", "FullyShardedDataParallel")
)


def _reaches_others(program: Program, call: ast.Call, name: str) -> bool:
    """Whether a framework's method waits for other ranks here: by an argument of it, or by how its
    object was made."""
    if name.endswith("LightningModule.log"):
        return program.values(argument(call, None, "sync_dist")) == {ConstantValue(True)}
    if name in _OF_SHARDED_STATES:
        return next(program.all_calls(*_PLUGINS), None) is not None
    if name.startswith("pytorch_lightning.Trainer."):
        makers = program.values(call.func.value) if isinstance(call.func, ast.Attribute) else ()
        made = [maker.call for maker in makers if isinstance(maker, CallResult)]
        return not any(_is_of_one(program, maker) for maker in made)
    return True


def _is_of_one(program: Program, trainer: ast.Call) -> bool:
    """`Trainer(devices=1)`, or one that is made where only some ranks come."""
    devices = program.values(argument(trainer, None, "devices"))
    return devices == {ConstantValue(1)} or any(rank_tests_at(program, trainer))


def _of_engine(program: Program, call: ast.Call) -> str:
    """`engine.save_checkpoint` of what deepspeed.initialize returned, `trainer.save_checkpoint` in
    a hook of Lightning."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    method = last_name(call.func)
    if owner is None or f"{DEEPSPEED}.{method}" not in _OF_FRAMEWORKS:
        return ""
    origins = [origin for origin in written_values(program, owner) if isinstance(origin, ast.Call)]
    if any(program.name_of(origin.func) == DEEPSPEED for origin in origins):
        return f"{DEEPSPEED}.{method}"
    is_hook = "lightning" in framework(program, program.source_of(call))
    return (
        f"pytorch_lightning.Trainer.{method}" if is_hook and last_name(owner) == "trainer" else ""
    )


def _has_shards(program: Program) -> bool:
    """Whether a model is sharded over ranks; otherwise each rank has the complete state."""
    names = (*FSDP, "torch.distributed.tensor.parallel.parallelize_module")
    return next(program.all_calls(*names), None) is not None


def has_group(program: Program, call: ast.Call) -> bool:
    """Whether the call names the participants: `group=`, or a group that was made."""
    groups = [
        keyword.value
        for keyword in call.keywords
        if keyword.arg is None or "group" in keyword.arg or keyword.arg == "no_dist"
    ]
    names_group = any(not _is_world(program, value) for value in groups)
    return names_group or any(_is_group(program, value) for value in call.args)


def _is_world(program: Program, value: ast.expr) -> bool:
    values = program.values(value)
    if values == {ConstantValue(None)}:  # or None at first, and later something unknown
        return all(isinstance(origin, ast.Constant) for origin in written_values(program, value))
    return values in (
        frozenset({Library("torch.distributed.GroupMember.WORLD")}),
        frozenset({Library("torch.distributed.group.WORLD")}),
    )


def _is_group(program: Program, value: ast.expr) -> bool:
    if _is_world(program, value):
        return False
    made = any(
        isinstance(result, CallResult) and "new_" in result.name for result in program.values(value)
    )
    name = last_name(value).lower()
    return made or name.endswith("group") or not {"group", "pg", "mesh"}.isdisjoint(name.split("_"))


def collectives_in(program: Program, node: ast.AST) -> Iterator[tuple[str, tuple[ast.Call, ...]]]:
    """All collectives that are called in it, with the chain of calls: the last is the collective
    itself."""
    likely = likely_collective_names(program)
    for call in nodes_in(node, ast.Call):
        if last_name(call.func) not in likely:
            continue
        if name := collective(program, call):
            yield name, (call,)
            continue
        function = program.function_of(call)
        if function is not None and not has_group(program, call):
            for inner, chain in collectives_of(program, function):
                yield inner, (call, *chain)


@cached_query
def likely_collective_names(program: Program) -> set[str]:
    """The names of functions that may call a collective, so that only few calls need a closer
    check."""
    likely = set(_LASTS)
    callers: dict[str, set[str]] = defaultdict(set)
    for source in program.sources:
        index = program.index(source)
        for scope in index.scopes.values():
            for name, bindings in scope.names.items():
                for binding in bindings:
                    if binding.imported:
                        callers[binding.imported.rpartition(".")[2]].add(name)
        for called, calls in index.calls.items():
            callers[called].update(map(_name_around, {scope_of(call) for call in calls}))
    pending = list(likely)
    while pending:
        new = callers[pending.pop()] - likely - {""}
        likely |= new
        pending += new
    return likely


def _name_around(scope: ScopeNode) -> str:
    """The name of the enclosing function, or of the class for `__init__`."""
    function = (
        scope
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef))
        else enclosing_function(scope)
    )
    if function is None:
        return ""
    owner = enclosing_class(function) if function.name == "__init__" else None
    return function.name if owner is None else owner.name


@recursive_query((), DEEPEST)
def collectives_of(
    program: Program, function: FunctionNode
) -> tuple[tuple[str, tuple[ast.Call, ...]], ...]:
    """The collectives that a function calls, the first of each name."""
    chains: dict[str, tuple[ast.Call, ...]] = {}
    for name, chain in collectives_in(program, function):
        chains.setdefault(name, chain)
    return tuple(chains.items())


def short_name(name: str) -> str:
    """`barrier` of `torch.distributed.barrier`."""
    return name.rpartition(".")[2]


MOST_CALLS = 60
DEEPEST_CALL = 6
Chain = tuple[ast.Call, ...]


def reached_in(
    program: Program, node: ast.AST, tests: Sequence[RankTest]
) -> Iterator[tuple[str, Chain]]:
    """As `collectives_in`, for ranks on which the tests hold, without those that may not be
    reached."""
    likely = likely_collective_names(program)
    for call in nodes_in(node, ast.Call):
        if last_name(call.func) in likely:
            yield from reached_by(program, call, tests)


def reached_by(
    program: Program, call: ast.Call, tests: Sequence[RankTest]
) -> list[tuple[str, Chain]]:
    """The collectives that one call makes, directly or not, the first of each name, with the chain
    of calls."""
    chains: dict[str, Chain] = {}
    for name, chain in _CollectiveWalk(program).through(
        call, CallFrame(None, call, None, tuple(tests))
    ):
        chains.setdefault(name, chain)
    return list(chains.items())


class _CollectiveWalk:
    """Follows one call into the functions that it runs, each with its arguments."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.num_looked = 0

    def through(self, call: ast.Call, place: CallFrame) -> Iterator[tuple[str, Chain]]:
        """`place`: the function that the call is in."""
        self.num_looked += 1
        if name := collective(self.program, call):
            yield name, (call,)
            return
        if (
            self.num_looked > MOST_CALLS
            or place.depth > DEEPEST_CALL
            or has_group(self.program, call)
        ):
            return
        function = self.program.function_of(call)
        if (
            function is None
            or place.is_within(function)
            or not collectives_of(self.program, function)
        ):
            return
        inner = CallFrame(function, call, place, place.tests)
        likely = likely_collective_names(self.program)
        for inner_call in nodes_in(function, ast.Call):
            if last_name(inner_call.func) in likely and _is_reached(
                self.program, inner_call, inner
            ):
                yield from (
                    (name, (call, *chain)) for name, chain in self.through(inner_call, inner)
                )


def _is_reached(program: Program, node: ast.AST, place: CallFrame) -> bool:
    """Whether a place of the entered function is certainly reached; an unknown parameter may
    prevent it."""
    held = _held_at(program, node)
    return all(
        _may_be(program, part, part_holds, place)
        for test, holds in held
        if not _is_likely(test, holds) or truth(program, test, place) is not None
        for part, part_holds in split_condition(test, holds)
    )


@cached_query
def _held_at(program: Program, node: ast.AST) -> list[tuple[ast.expr, bool]]:
    return list(conditions(program, node))


def _may_be(program: Program, test: ast.expr, holds: bool, place: CallFrame) -> bool:
    if _is_on_counter(program, test):
        return False
    is_true = truth(program, test, place)
    if is_true is not None:
        return is_true == holds
    if _is_first_time(test):
        return False
    is_always = is_about_being_distributed(test) and not rank_tests(program, test)
    return is_always or not is_on_parameter(program, test, place)


def _is_first_time(test: ast.expr) -> bool:
    """`if not hasattr(function, "_group")`, `if _GROUP is None`, `if not Group.instance`: what is
    made once may have been made before."""
    if isinstance(test, ast.Attribute):
        return test.attr.strip("_").endswith("instance")
    if isinstance(test, ast.Compare):
        compared = test.comparators[0]
        is_none = isinstance(compared, ast.Constant) and compared.value is None
        return is_none and isinstance(test.ops[0], ast.Is | ast.Eq)
    return any(last_name(call.func) == "hasattr" for call in nodes_in(test, ast.Call))


def _is_on_counter(program: Program, test: ast.expr) -> bool:
    """`if DEPTH >= 1: return`, where functions count a global name up and down, also behind a
    function that returns it."""
    counters = _counters(program, program.source_of(test))
    functions = [program.function_of(call) for call in nodes_in(test, ast.Call) if counters]
    places = [test, *(function for function in functions if function is not None)]
    return bool(counters) and any(
        name.id in counters for place in places for name in nodes_in(place, ast.Name)
    )


@cached_query
def _counters(program: Program, source: Source) -> set[str]:
    index = program.index(source)
    shared = {name for statement in index.every(ast.Global) for name in statement.names}
    return shared & {last_name(statement.target) for statement in index.every(ast.AugAssign)}


def _is_likely(test: ast.expr, holds: bool) -> bool:
    """Whether it holds in correct code: a loop's condition, and the code after `if bad: raise`."""
    statement = parent_of(test)
    left = (
        [] if not isinstance(statement, ast.If) else statement.orelse if holds else statement.body
    )
    return isinstance(statement, ast.While) or (bool(left) and isinstance(left[-1], ast.Raise))


# Finds calls in a node: the name of each, and the chain of calls.
Find = Callable[[ast.AST], Iterable[tuple[str, tuple[ast.Call, ...]]]]


def has_counterpart(
    program: Program, call: ast.Call, name: str, tests: Sequence[RankTest], find: Find
) -> bool:
    """Whether the excluded ranks call the same elsewhere in the function."""
    instead = [node for branch in _other_branches(program, call) for node in branch]
    if any(name == name_instead for node in instead for name_instead, _ in find(node)):
        return True
    function = enclosing_function(call) or program.source_of(call).tree
    tests_written = _written(program, call)
    for candidate_name, chain in find(function):
        candidate = chain[0]
        if (
            candidate_name != name
            or candidate is call
            or _written(program, candidate) == tests_written
        ):
            continue
        candidate_tests = _needed_tests(program, candidate)
        if any(
            _are_opposite(test, candidate_test)
            for test in tests
            for candidate_test in candidate_tests
        ):
            return True
    return False


def who_calls(test: RankTest) -> str:
    if test.is_main:
        return (
            "only one process of each node calls" if test.kind == "local" else "only rank 0 calls"
        )
    return "only some ranks call" if test.is_main is None else "all ranks but one call"


@cached_query
def _needed_tests(program: Program, node: ast.AST) -> list[RankTest]:
    return [test for test in rank_tests_at(program, node) if test.is_needed]


@cached_query
def _written(program: Program, node: ast.AST) -> list[tuple[str, bool]]:
    return [
        (ast.dump(test), holds)
        for test, holds in conditions(program, node)
        if rank_tests(program, test)
    ]


def _other_branches(program: Program, node: ast.AST) -> Iterator[list[ast.AST]]:
    """What the excluded ranks run instead, if a condition on ranks decides."""
    inner: ast.AST = node
    for outer in ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if not isinstance(outer, (ast.If, ast.IfExp)) or inner is outer.test:
            pass
        elif rank_tests(program, outer.test):
            yield _instead(program, outer, inner)
        inner = outer


def _instead(program: Program, branching: ast.If | ast.IfExp, taken: ast.AST) -> list[ast.AST]:
    if isinstance(branching, ast.IfExp):
        return [branching.orelse if taken is branching.body else branching.body]
    taken_branch, other_branch = branches_of(branching, taken)
    following = rest_of_block(branching) if _may_exit(taken_branch) else []
    return [*other_branch, *following]


def _may_exit(block: list[ast.stmt]) -> bool:
    """Whether some of the ranks that take it do not come to what follows."""
    return any(nodes_in(part, ast.Return, ast.Continue, ast.Break) for part in block)


def _are_opposite(test: RankTest, candidate: RankTest) -> bool:
    """Whether one is for rank 0 and the other for the rest; other conditions are not comparable."""
    if test.is_main is None or candidate.is_main is None:
        return test.is_main is candidate.is_main
    return test.kind == candidate.kind and test.is_main != candidate.is_main
