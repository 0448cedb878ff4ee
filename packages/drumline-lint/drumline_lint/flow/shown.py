"""Whether a chain of calls shows that every rank of a distributed run comes to a place.

Stricter than `is_on_every_rank`: each call is resolved, one of the frames joins the process group
before it goes on, and no condition on the way may be a guard, also by its name alone.
"""

from __future__ import annotations

import ast
import re
from enum import IntEnum

from drumline_lint.flow.conditions import are_exclusive, conditions, rank_tests, rank_tests_at
from drumline_lint.flow.dead_code import is_switched_off
from drumline_lint.flow.guards import guards_of_decorators, is_of_no_rank
from drumline_lint.flow.single_process import (
    is_in_single_process_run,
    is_start_by_name,
    says_distributed,
)
from drumline_lint.program.calls import argument
from drumline_lint.program.names import ACCELERATOR, DDP, DEEPSPEED, FABRIC, FSDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.queries import recursive_query
from drumline_lint.program.ranks import OF_VARIABLE
from drumline_lint.program.tree import (
    FunctionNode,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
)
from drumline_lint.program.value import ConstantValue

_JOINING = frozenset({INIT, DDP, *FSDP, FABRIC, DEEPSPEED, "drumline.DDPManager"})
_LAUNCHED = frozenset({*OF_VARIABLE, "WORLD_SIZE"})
# Flags that may let a single rank through, and objects that only a single rank may have.
_GUARDING = re.compile(
    r"(^|_)(main|master|rank|rank0|primary|chief|leader|root|zero|coordinator|writer?|saver?|saving"
    r"|logger|tracker|recorder|wandb|tb|tensorboard|verbose|local)(_|\d|$)|should|is_first"
)
_ONE_OF_ALL = re.compile(r"(^|_)(master|main_process|main_only|rank_?0|rank_?zero)(_|$)")
_WAITING = ("barrier", "synchronize", "wait_for_everyone")


class Reach(IntEnum):
    """How far a chain of calls shows that every rank comes to a place."""

    UNKNOWN = 0
    """No chain without a possible guard is seen from where a process begins."""
    CALLED = 1
    """There is one, but nothing on it joins a process group."""
    JOINED = 2


def is_shown_on_every_rank(program: Program, node: ast.AST) -> bool:
    """Whether such a chain is seen from where a process begins: a script, a started function, or a
    function that joins the group itself and that nothing calls."""
    return _reach(program, node) is Reach.JOINED


@recursive_query(Reach.UNKNOWN)
def _reach(program: Program, node: ast.AST) -> Reach:
    if _may_be_guarded(program, node) or is_of_no_rank(program, node):
        return Reach.UNKNOWN
    function = enclosing_function(node)
    reach = _reach_of_file(program, node) if function is None else _reach_of(program, function)
    is_joining = reach is Reach.CALLED and _joins_before(program, node)
    return Reach.JOINED if is_joining else reach


def _reach_of_file(program: Program, node: ast.AST) -> Reach:
    is_alone = program.source_of(node).is_notebook or is_in_single_process_run(program, node)
    return Reach.UNKNOWN if is_alone else Reach.CALLED


@recursive_query(Reach.UNKNOWN)
def _reach_of(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Reach:
    if guards_of_decorators(program, function) or _ONE_OF_ALL.search(function.name.lower()):
        return Reach.UNKNOWN
    calls = program.callers(function)
    if not calls:
        is_method = enclosing_class(function) is not None
        return Reach.UNKNOWN if is_method else Reach.CALLED
    return max(_reach_by(program, function, call) for call in calls)


def _reach_by(program: Program, function: FunctionNode, call: ast.Call) -> Reach:
    """A process that a call starts has neither the conditions nor the group of its parent."""
    if function in program.started_functions(call) and last_name(call.func) != "Thread":
        return Reach.UNKNOWN if _is_one_by_default(program, call) else Reach.CALLED
    return _reach(program, call)


def _is_one_by_default(program: Program, call: ast.Call) -> bool:
    """`mp.spawn(train, nprocs=args.gpus)`, where `--gpus` is 1 unless another is given."""
    count = argument(call, 2, "nprocs")
    option = "" if count is None else last_name(count)
    return bool(option) and any(
        any(_names_option(name, option) for name in addition.args)
        and program.values(argument(addition, None, "default")) == {ConstantValue(1)}
        for addition in program.index(program.source_of(call)).calls.get("add_argument", ())
    )


def _names_option(name: ast.expr, option: str) -> bool:
    text = name.value if isinstance(name, ast.Constant) else None
    return isinstance(text, str) and text.lstrip("-").replace("-", "_") == option


def _may_be_guarded(program: Program, node: ast.AST) -> bool:
    if any(rank_tests_at(program, node)) or takes_turns(program, node):
        return True
    return any(
        says_distributed(program, test) is None
        and (
            _names_guard(test)
            or _is_given_by_rank(program, test)
            or _is_beside_training(test, holds)
        )
        for test, holds in conditions(program, node)
    )


def _is_beside_training(test: ast.expr, holds: bool) -> bool:
    """The `else` of `if args.mode == "train"`: steps that are often made by one process."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return False
    mode = test.comparators[0]
    is_of_training = isinstance(mode, ast.Constant) and str(mode.value).startswith("train")
    return is_of_training and holds != isinstance(test.ops[0], ast.Eq)


def _is_given_by_rank(program: Program, test: ast.expr) -> bool:
    """`if folder is not None`, where a caller gives `folder if is_main else None`, or a function that
    asks for the rank returns it."""
    bindings = [binding for name in nodes_in(test, ast.Name) for binding in program.bindings(name)]
    parameters = [binding.node for binding in bindings if isinstance(binding.node, ast.arg)]
    arguments = [value for parameter in parameters for value in program.arguments_for(parameter)]
    helpers = [
        program.function_of(binding.value)
        for binding in bindings
        if isinstance(binding.value, ast.Call)
    ]
    branches = [
        branch for helper in helpers if helper is not None for branch in nodes_in(helper, ast.If)
    ]
    if any(rank_tests(program, branch.test) for branch in branches):
        return True
    return any(
        isinstance(value, ast.IfExp)
        and (rank_tests(program, value.test) or _names_guard(value.test))
        for value in arguments
    )


def _names_guard(test: ast.expr) -> bool:
    words = [last_name(name) for name in nodes_in(test, ast.Name, ast.Attribute)]
    keys = [constant.value for constant in nodes_in(test, ast.Constant)]
    words += [key for key in keys if isinstance(key, str)]
    return "__name__" not in words and any(_GUARDING.search(word.lower()) for word in words)


def takes_turns(program: Program, node: ast.AST) -> bool:
    """`if rank != 0: dist.barrier()` before it: the others wait until the first is done."""
    return any(
        position(barrier) < position(node) and any(rank_tests_at(program, barrier))
        for barrier in nodes_in(scope_of(node), ast.Call)
        if last_name(barrier.func) in _WAITING
    )


def _joins_before(program: Program, node: ast.AST) -> bool:
    """Whether its function has joined the group when it comes there, or has read the launcher's
    variables."""
    scope = scope_of(node)
    return any(
        position(call) < position(node)
        and _joins(program, call)
        and not are_exclusive(program, call, node)
        for call in nodes_in(scope, ast.Call)
    ) or any(
        position(variable) < position(node) and _is_launched(program, variable)
        for variable in nodes_in(scope, ast.Subscript)
    )


def _joins(program: Program, call: ast.Call) -> bool:
    if is_switched_off(program, list(conditions(program, call))):
        return False
    name = program.name_of(call.func)
    if name == ACCELERATOR:  # tools of one process make one as well
        return "backward(" in program.source_of(call).text
    if name in _JOINING or is_start_by_name(program, call):
        return True
    function = program.function_of(call)
    return function is not None and joins_within(program, function)


@recursive_query(False)
def joins_within(program: Program, place: ast.AST) -> bool:
    """Whether the code of a function or a file joins the group, directly or not."""
    return any(_joins(program, call) for call in nodes_in(place, ast.Call)) or any(
        _is_launched(program, variable) for variable in nodes_in(place, ast.Subscript)
    )


def _is_launched(program: Program, variable: ast.Subscript) -> bool:
    """`os.environ["RANK"]`; `os.environ.get("RANK", 0)` also runs without a launcher."""
    is_named = isinstance(variable.slice, ast.Constant) and variable.slice.value in _LAUNCHED
    return (
        is_named
        and program.name_of(variable.value) == "os.environ"
        and not is_switched_off(program, list(conditions(program, variable)))
    )
