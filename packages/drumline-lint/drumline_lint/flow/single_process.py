"""Whether a place is reached in runs with one process only: the `else` of `if args.distributed`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from drumline_lint.flow.conditions import Conditions, conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import makes
from drumline_lint.flow.run_order import (
    MOST_STEPS,
    Run,
    all_imported,
    all_runs,
    is_for_script,
    steps_calling,
    steps_of,
)
from drumline_lint.program.names import DDP, DISTRIBUTED_SAMPLER, FSDP, INIT, STARTS
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.ranks import OF_FUNCTION, is_world_size
from drumline_lint.program.tree import (
    FunctionNode,
    ancestors,
    branches_of,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source

_MANAGER = "drumline.DDPManager"
_WRAPPING = frozenset({DDP, *FSDP, _MANAGER})
# Unknown functions that may start ranks.
_MAY_START = re.compile(
    r"init\w*(dist|group|ddp|process|env)|setup\w*(dist|ddp)|launch|spawn", re.IGNORECASE
)
# `initialize` is also the name of many other things, as of hydra and of apex.
_INITIALIZING = ("deepspeed.initialize", "colossalai.initialize")
_STARTING_NAME = re.compile(r"init\w*(dist|process_group|ddp)|setup\w*(dist|ddp)", re.IGNORECASE)


def is_in_single_process_run(program: Program, node: ast.AST) -> bool:
    """For code outside of functions: whether it runs only in a run that starts no process group."""
    source = program.source_of(node)
    is_main = any(
        isinstance(outer, ast.stmt) and is_for_script(outer) for outer in (node, *ancestors(node))
    )
    is_script = is_main or source not in all_imported(program)
    return is_script and _is_lone(program, source)


@cached_query
def _is_lone(program: Program, source: Source) -> bool:
    """Whether a script is a single process: everything that it wraps must also be wrapped in runs
    that start a group."""
    if not has_start(program) or framework(program, source):
        return False
    run: Run = []
    for step in steps_of(program, source):
        if may_start(program, step.call):
            return False
        run.append(step)
    if len(run) >= MOST_STEPS:
        return False
    wrapping = _wrapping(program, run)
    return not wrapping or wrapping <= _wrapped_in_groups(program)


@cached_query
def _wrapped_in_groups(program: Program) -> set[ast.Call]:
    """The calls that wrap a model in runs that start a group."""
    runs = (run for run in all_runs(program) if _starts_group(program, run))
    return set[ast.Call]().union(*(_wrapping(program, run) for run in runs))


def _wrapping(program: Program, run: Run) -> set[ast.Call]:
    return {run[number].call for number in steps_calling(program, run, *_WRAPPING)}


def _starts_group(program: Program, run: Run) -> bool:
    return bool(steps_calling(program, run, INIT)) or any(
        is_start_by_name(program, step.call) for step in run
    )


@cached_query
def has_start(program: Program) -> bool:
    """Whether a call is seen that starts a process group, also one of a library: `timm.utils
    .init_distributed_device`."""
    if next(program.all_calls(INIT), None) is not None:
        return True
    return any(
        is_start_by_name(program, call)
        for source in program.sources
        for name, calls in program.index(source).calls.items()
        if _STARTING_NAME.search(name)
        for call in calls
    )


def is_start_by_name(program: Program, call: ast.Call) -> bool:
    return bool(_STARTING_NAME.search(last_name(call.func))) and program.function_of(call) is None


def may_start(program: Program, call: ast.Call) -> bool:
    """Whether a call starts a process group, or may, if its function is not given."""
    named = program.name_of(call.func)
    if named in (INIT, _MANAGER):
        return True
    if program.function_of(call) is not None:
        return False
    name = last_name(call.func)
    function_key = (name, isinstance(call.func, ast.Attribute))
    is_of_files = not named and function_key in _starting(program)
    return is_of_files or named in _INITIALIZING or bool(_MAY_START.search(name))


@cached_query
def _starting(program: Program) -> set[tuple[str, bool]]:
    """The names of all functions that start a process group, directly or not, and whether they are
    methods."""
    pending = list(program.all_calls(INIT))
    functions = set[ast.AST]()
    names = set()
    while pending:
        function = enclosing_function(pending.pop())
        if function is not None and function not in functions:
            functions.add(function)
            names.add((function.name, enclosing_class(function) is not None))
            pending += program.callers(function)
    return names


DEEPEST = 6
_STARTS = {DDP, DISTRIBUTED_SAMPLER, INIT, *FSDP}
_FLAGS = set(
    "ddp dist dist_mode distributed enable_ddp is_ddp is_dist is_dist_avail_and_initialized "
    "is_distributed is_initialized is_multi_gpu is_parallel is_torchelastic_launched multi_gpu multigpu "
    "multiprocessing_distributed parallel use_ddp use_dist use_distributed with_ddp".split()
)
_COUNTS = set("n_gpu n_gpus ngpu ngpus num_gpu num_gpus nprocs num_processes device_count".split())


def holds_on_every_way(
    program: Program, node: ast.AST, holds_at: Callable[[ast.AST], bool], depth: int = 0
) -> bool:
    """Whether something holds at a place, or at all calls of its function, or at all calls of their
    functions."""
    if holds_at(node):
        return True
    function = enclosing_function(node)
    if function is None or depth > DEEPEST:
        return False
    calls = [call for call in program.callers(function) if enclosing_function(call) is not function]
    return bool(calls) and all(
        holds_on_every_way(program, call, holds_at, depth + 1) for call in calls
    )


def is_single_process(program: Program, node: ast.AST) -> bool:
    """Whether there is only one process here, by a condition around it or around all of its
    calls."""
    return holds_on_every_way(program, node, lambda place: _is_single_process_at(program, place))


def _is_single_process_at(program: Program, node: ast.AST) -> bool:
    if any(
        says_distributed(program, test) is (not holds) for test, holds in conditions(program, node)
    ):
        return True
    is_outside = enclosing_function(node) is None
    return _is_in_other_branch(program, node) or (
        is_outside and is_in_single_process_run(program, node)
    )


def is_single_process_here(program: Program, node: ast.AST, held: Conditions) -> bool:
    """The same by conditions in its own function only: if `distributed and train` does not hold,
    nothing is certain."""
    for test, holds in held:
        if _says_one(program, test, holds) and not _begins_there(program, node, test):
            return True
        outer = parent_of(test)
        if not isinstance(outer, ast.If) or not outer.orelse or outer not in ancestors(node):
            continue
        if _groups_begun(program, outer) == (not holds, holds):
            return True
    return False


def _begins_there(program: Program, node: ast.AST, test: ast.expr) -> bool:
    """In `if not dist.is_initialized(): dist.init_process_group()` ranks begin."""
    branches = parent_of(test)
    if not isinstance(branches, ast.If) or branches not in ancestors(node):
        return False
    is_body = any(outer in branches.body for outer in (node, *ancestors(node)))
    return _begins(program, branches.body if is_body else branches.orelse)


def _says_one(program: Program, test: ast.expr, holds: bool) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _says_one(program, test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if not _is_about_support(part)]
        answers = [_says_one(program, part, holds) for part in parts]
        return (
            any(answers)
            if isinstance(test.op, ast.And) is holds
            else bool(answers) and all(answers)
        )
    return says_distributed(program, test) is (not holds) and not _is_about_device(test)


def _is_about_device(test: ast.expr) -> bool:
    """`gpu is None`: there may still be several processes."""
    return isinstance(test, ast.Compare) and "gpu" in _named(test.left).lower()


def _is_about_support(test: ast.expr) -> bool:
    """`dist.is_available()` always holds."""
    return isinstance(test, ast.Call) and last_name(test.func) == "is_available"


@cached_query
def _groups_begun(program: Program, branches: ast.If) -> tuple[bool, bool]:
    """In which branches a process group is started; not checked if the condition itself decides."""
    if says_distributed(program, branches.test) is not None:
        return (False, False)
    return _begins(program, branches.body), _begins(program, branches.orelse)


def _is_in_other_branch(program: Program, node: ast.AST) -> bool:
    """The `else` of `if x: model = DDP(model)` is for one process, whatever x is."""
    inner = node
    for outer in ancestors(node):
        if isinstance(outer, ast.If) and inner is not outer.test:
            taken_branch, other_branch = branches_of(outer, inner)
            if _starts(program, other_branch) and not _starts(program, taken_branch):
                return True
        inner = outer
    return False


def _begins(program: Program, block: list[ast.stmt]) -> bool:
    return any(makes(program, statement, _begins_group) for statement in block)


def _begins_group(program: Program, call: ast.Call) -> bool:
    return program.name_of(call.func) == INIT or any(
        makes(program, main, _begins_group) for main in program.started_functions(call)
    )


def _starts(program: Program, block: list[ast.stmt]) -> bool:
    return any(makes(program, statement, _starts_ranks) for statement in block)


def _starts_ranks(program: Program, call: ast.Call) -> bool:
    return program.name_of(call.func) in _STARTS or any(
        makes(program, main, _starts_ranks) for main in program.started_functions(call)
    )


def says_distributed(program: Program, test: ast.expr, depth: int = 0) -> bool | None:
    """True if the condition means several processes, False if it means one; None: something
    else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = says_distributed(program, test.operand, depth)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = {says_distributed(program, part, depth) for part in test.values}
        deciding = isinstance(test.op, ast.And)
        return deciding if deciding in parts else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _said_by_comparison(program, test)
    if _named(test).lower().strip("_") in _FLAGS:
        return True
    if isinstance(test, ast.Name) and depth < DEEPEST:
        answers = {
            says_distributed(program, origin, depth + 1)
            for origin in written_values(program, test)
            if origin is not test
        }
        return answers.pop() if len(answers) == 1 else None
    return None


def _named(test: ast.expr) -> str:
    """`dist` of `opt.dist`, `opt["dist"]` and `opt.get("dist")`."""
    key: ast.expr | None = None
    if isinstance(test, ast.Subscript):
        key = test.slice
    elif isinstance(test, ast.Call) and last_name(test.func) == "get" and test.args:
        key = test.args[0]
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    return last_name(test.func if isinstance(test, ast.Call) else test)


def _said_by_comparison(program: Program, test: ast.Compare) -> bool | None:
    operator = test.ops[0]
    left = test.left
    right = test.comparators[0]
    if isinstance(operator, (ast.In, ast.NotIn)):
        is_asked = isinstance(left, ast.Constant) and left.value in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        )
        return isinstance(operator, ast.In) if is_asked else None
    constants = [value.value for value in program.values(right) if isinstance(value, ConstantValue)]
    if _named(left) == "launcher" and constants in (["none"], [None], [""]):
        return isinstance(operator, (ast.NotEq, ast.IsNot))
    if any(isinstance(value, Rank) for value in program.values(left)) and constants in (
        [-1],
        [None],
    ):
        return isinstance(operator, (ast.NotEq, ast.IsNot, ast.Gt))
    if _counts_processes(left) and constants in ([1], [2], [0]):
        return isinstance(operator, (ast.Gt, ast.GtE, ast.NotEq))
    return None


def _counts_processes(node: ast.expr) -> bool:
    inner = (
        node.args[0]
        if isinstance(node, ast.Call) and last_name(node.func) == "int" and node.args
        else node
    )
    name = last_name(inner.func if isinstance(inner, ast.Call) else inner).lower()
    return is_world_size(inner) or name in _COUNTS


def is_in_run(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether distributed code may come here: not a function without callers that starts
    nothing."""
    function = enclosing_function(node)
    if function is None or depth > DEEPEST:
        return True
    calls = [call for call in program.callers(function) if enclosing_function(call) is not function]
    if calls:
        return any(is_in_run(program, call, depth + 1) for call in calls)
    owner = enclosing_class(function)
    home = function if owner is None else owner
    return any(
        _is_of_ranks(program, call) or _comes_to_ranks(program, program.function_of(call))
        for call in nodes_in(home, ast.Call, into_functions=True)
    )


def _is_of_ranks(program: Program, call: ast.Call) -> bool:
    return program.name_of(call.func) in {*STARTS, *OF_FUNCTION}


def _comes_to_ranks(program: Program, function: FunctionNode | None) -> bool:
    return function is not None and makes(program, function, _is_of_ranks)
