"""Which ranks reach a place: the conditions there, and on every chain of calls that leads to it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from drumline_lint.flow.conditions import Conditions, conditions, early_exits_before, rank_tests_at
from drumline_lint.flow.dead_code import is_switched_off
from drumline_lint.flow.single_process import (
    has_start,
    is_in_single_process_run,
    is_single_process_here,
    may_start,
)
from drumline_lint.program.names import DDP, FSDP, INIT, STARTS
from drumline_lint.program.program import Program
from drumline_lint.program.queries import leads_to, recursive_query
from drumline_lint.program.ranks import OF_VARIABLE
from drumline_lint.program.tree import (
    FUNCTIONS,
    FunctionNode,
    ancestors,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import Function, Instance, RankTest
from drumline_lint.reading.source import Source

Guards = frozenset[RankTest]
MOST_WAYS = 60
_GUARDING_DECORATORS = (
    "rank_zero",
    "rank0",
    "main_process",
    "master",
    "main_only",
    "main_rank",
    "is_main",
)
# An object that calls one of these is of a rank; collectives are in libraries as well.
_OWNING = frozenset({INIT, "drumline.DDPManager", DDP, *FSDP})
_SPAWNING = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


@dataclass(frozen=True)
class CallPath:
    """One chain of calls to a place."""

    guards: Guards
    """All conditions on ranks on it."""
    begins: str
    """ranks: in code that every rank runs; unknown: in code that nothing calls; parent: outside of
    ranks.

    `parent` is the process that starts the ranks, a single process, or code that is never reached.
    """


def call_paths(program: Program, node: ast.AST) -> list[CallPath]:
    """All chains of calls on which a place is reached, as far as known."""
    paths = _ways(program, node)[:MOST_WAYS]
    return paths or [CallPath(frozenset(rank_tests_at(program, node)), "unknown")]


def _ways(program: Program, node: ast.AST) -> list[CallPath]:
    tests = frozenset(rank_tests_at(program, node))
    function = enclosing_function(node)
    if is_of_no_rank(program, node):
        return [CallPath(tests, "parent")]
    if function is None and is_in_single_process_run(program, node):
        return [CallPath(tests, "parent")]
    if function is None:
        return [CallPath(tests, _beginning_of_file(program, program.source_of(node)))]
    tests |= guards_of_decorators(program, function)
    return [
        CallPath(tests | way.guards, way.begins) for way in _ways_to_function(program, function)
    ]


@recursive_query([])  # a recursive call adds no chain
def _ways_to_function(
    program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> list[CallPath]:
    calls = program.callers(function)
    if not calls and (perhaps := _perhaps_callers(program, function)):
        # their guards count; whether ranks begin there, the function itself says
        begins = _beginning(program, function)
        paths = _ways_by_calls(program, function, perhaps)
        return [path if path.begins == "parent" else replace(path, begins=begins) for path in paths]
    if not calls:
        tests = frozenset(rank_tests_at(program, function))
        return [CallPath(tests, _beginning(program, function))]
    return _ways_by_calls(program, function, calls)


def _ways_by_calls(
    program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef, calls: list[ast.Call]
) -> list[CallPath]:
    paths: list[CallPath] = []
    for call in calls:
        if function in program.started_functions(call) and last_name(call.func) != "Thread":
            # A new process: the conditions of its parent do not apply.
            is_lone = enclosing_function(call) is None and is_in_single_process_run(program, call)
            paths.append(CallPath(frozenset(), "parent" if is_lone else "ranks"))
        else:
            paths += _ways(program, call)
        if len(paths) > MOST_WAYS:
            break
    return list(dict.fromkeys(paths))


def _perhaps_callers(
    program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> list[ast.Call]:
    if enclosing_class(function) is None:
        return []
    return [
        call
        for source in program.files.calling.get(function.name, ())
        for call in program.index(source).calls.get(function.name, ())
        if isinstance(call.func, ast.Attribute) and not program.values(call.func)
    ]


def _beginning(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """For a function without callers: ranks begin there if it joins a group, itself or in a
    function that it calls, or if its class does."""
    if starts_ranks(program, function):
        return "parent"
    owner = enclosing_class(function)
    methods = [] if owner is None else nodes_in(owner, ast.FunctionDef, into_functions=True)
    called = [program.function_of(call) for call in nodes_in(function, ast.Call)]
    joining = [*methods, *(callee for callee in called if callee is not None)]
    is_start = bool(_names_of_calls(program, function) & STARTS) or any(
        _names_of_calls(program, place) & _OWNING for place in joining
    )
    return "ranks" if is_start else "unknown"


def _names_of_calls(program: Program, node: ast.AST) -> set[str]:
    return {program.name_of(call.func) for call in nodes_in(node, ast.Call)}


def _beginning_of_file(program: Program, source: Source) -> str:
    if starts_ranks(program, source.tree):
        return "parent"
    # a notebook is one process, whatever its cells show how to call
    is_start = not source.is_notebook and (
        _joins_group(program, source.tree) or bool(_names_of_calls(program, source.tree) & STARTS)
    )
    return "ranks" if is_start else "unknown"


def is_of_no_rank(program: Program, node: ast.AST) -> bool:
    held = list(conditions(program, node))
    return bool(held) and (
        is_single_process_here(program, node, held)
        or _is_without_ranks(program, held)
        or is_switched_off(program, held)
    )


def _is_without_ranks(program: Program, held: Conditions) -> bool:
    """Code after `if "RANK" in os.environ: ...; return` is for processes without a launcher."""
    for test, holds in held:
        if isinstance(test, ast.Compare) and program.name_of(test.comparators[0]) == "os.environ":
            is_in = isinstance(test.ops[0], ast.In)
            asks_for_rank = isinstance(test.left, ast.Constant) and test.left.value in (
                *OF_VARIABLE,
                "WORLD_SIZE",
            )
            if asks_for_rank and is_in != holds:
                return True
    return False


def starts_ranks(program: Program, node: ast.AST) -> bool:
    """Whether it starts the ranks' processes, directly or not."""
    return leads_to(program, node, _starts_here, _functions_called)


def _starts_here(program: Program, node: ast.AST) -> bool:
    return any(
        program.name_of(call.func) in _SPAWNING
        or any(_is_rank(program, started) for started in program.started_functions(call))
        for call in nodes_in(node, ast.Call)
    )


def _functions_called(program: Program, node: ast.AST) -> list[FunctionNode]:
    functions = [program.function_of(call) for call in nodes_in(node, ast.Call)]
    return [function for function in functions if function is not None]


def _is_rank(program: Program, started: FunctionNode) -> bool:
    """Not every started process is one."""
    is_direct = bool(_names_of_calls(program, started) & STARTS)
    return is_direct or _joins_group(program, started)


def _joins_group(program: Program, node: ast.AST) -> bool:
    """Whether it joins a process group, directly or not."""
    return leads_to(program, node, _joins_here, _functions_run)


def _joins_here(program: Program, node: ast.AST) -> bool:
    return any(_may_join(program, call) for call in nodes_in(node, ast.Call))


def _functions_run(program: Program, node: ast.AST) -> list[FunctionNode]:
    """What calls run; in a `with`, also what enters it."""
    functions: list[FunctionNode | None] = [*_functions_called(program, node)]
    for call in nodes_in(node, ast.Call):
        if isinstance(parent_of(call), ast.withitem):
            instances = [value for value in program.values(call) if isinstance(value, Instance)]
            functions += [program.method(instance.of, "__enter__") for instance in instances]
    return [function for function in functions if function is not None]


def _may_join(program: Program, call: ast.Call) -> bool:
    """Where nothing is seen to start a group, whatever only ranks call is a sign of it; else a
    library's collectives are not: one process calls them, too."""
    if not has_start(program):
        return program.name_of(call.func) in STARTS
    return may_start(program, call)


def guards(program: Program, node: ast.AST) -> Guards:
    """The conditions on ranks under which it is reached; empty: every rank comes here, as far as
    known."""
    every = [way.guards for way in call_paths(program, node) if way.begins != "parent"]
    if not every or not all(every):
        return frozenset()
    return frozenset.intersection(*every) or frozenset.union(*every)


def is_main_only(tests: Guards) -> bool:
    """Whether these conditions select one process of the whole job."""
    kinds = {test.kind for test in tests if test.is_main and test.is_needed}
    return bool(kinds & {"global", "spawned"}) or {"local", "node"} <= kinds


def is_on_main_only(program: Program, node: ast.AST) -> bool:
    """Whether only one process of the whole job comes here."""
    return all(
        way.begins == "parent" or is_main_only(way.guards) for way in call_paths(program, node)
    )


def is_on_some_only(program: Program, node: ast.AST) -> bool:
    """Whether some ranks come here and others do not."""
    return all(way.begins == "parent" or way.guards for way in call_paths(program, node))


def is_on_every_rank(program: Program, node: ast.AST) -> bool:
    """Whether it is certain that all ranks come here; not for a function without callers in the
    given files."""
    return any(way.begins == "ranks" and not way.guards for way in call_paths(program, node))


def guards_of_decorators(
    program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Guards:
    """The conditions on ranks of a function's decorators, by their code or their name."""
    tests: set[RankTest] = set()
    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        functions = [value.node for value in program.values(named) if isinstance(value, Function)]
        for decorating in functions:
            tests.update(_guards_in_wrapper(program, decorating))
        name = last_name(named).lower()
        if (
            not functions
            and any(part in name for part in _GUARDING_DECORATORS)
            and "first" not in name
        ):
            tests.add(RankTest("local" if "local" in name else "global", True))
    return frozenset(tests)


def _guards_in_wrapper(program: Program, decorator: FunctionNode) -> Guards:
    """The conditions under which a decorator, or the one that `only_on(rank)` makes, calls its
    function."""
    functions = [decorator, *nodes_in(decorator, *FUNCTIONS, into_functions=True)]
    parameters = {parameter.arg for function in functions for parameter in function.args.args}
    calls = [
        call
        for call in nodes_in(decorator, ast.Call, into_functions=True)
        if isinstance(call.func, ast.Name) and call.func.id in parameters
    ]
    every = [frozenset(rank_tests_at(program, call)) for call in calls]
    return frozenset.intersection(*every) if every else frozenset()


def is_now_and_then(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Whether a condition between it and an outer node holds only sometimes: `if step % 100 ==
    0`."""
    inner: ast.AST = node
    for outer in ancestors(node):
        if (
            isinstance(outer, (ast.If, ast.IfExp))
            and inner is not outer.test
            and _is_sometimes(outer.test)
        ):
            return True
        if isinstance(inner, ast.stmt):
            before = early_exits_before(program, inner)
            if any(_is_sometimes(test) for test, _ in before):
                return True
        if outer is until:
            return False
        inner = outer
    return False


def _is_sometimes(test: ast.expr) -> bool:
    """A remainder, a comparison of steps or times, or a flag computed from one; not `if train:`."""
    if any(isinstance(operation.op, ast.Mod) for operation in nodes_in(test, ast.BinOp)):
        return True
    words = {last_name(name).lower() for name in nodes_in(test, ast.Name, ast.Attribute)}
    return any(part in word for word in words for part in _SOMETIMES)


_SOMETIMES = tuple(
    "log report print verbose debug every interval is_last should sync time boundary".split()
)
