"""Which ranks reach a place: the conditions there, and on a short chain of calls that leads to it.

Nothing is assumed: where no chain is seen from code that joins a process group, it is unknown who
comes, and rules are silent.
"""

from __future__ import annotations

import ast
import re
from enum import IntEnum

from drumline_lint.flow.conditions import (
    are_exclusive,
    conditions,
    is_dead,
    rank_tests_at,
    split_condition,
)
from drumline_lint.program.names import ACCELERATOR, COLLECTIVES, DDP, DEEPSPEED, FABRIC, FSDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import OF_VARIABLE, is_world_size
from drumline_lint.program.tree import (
    FUNCTIONS,
    FunctionNode,
    ancestors,
    called_name,
    calls_beside,
    enclosing_class,
    enclosing_function,
    is_after,
    last_name,
    nodes_in,
    scope_of,
)
from drumline_lint.program.value import ConstantValue, Function, Rank, RankTest

Guards = frozenset[RankTest]
MOST_CALLERS = 20
DEEPEST = 2
_JOINING = COLLECTIVES | {INIT, DDP, *FSDP, FABRIC, DEEPSPEED, "drumline.DDPManager"}
_JOINING_NAME = re.compile(r"init\w*(dist|process_group|ddp)|setup\w*(dist|ddp)", re.IGNORECASE)
# Flags that may let a single rank through, and objects that only a single rank may have.
_GUARDING = re.compile(
    r"(^|_)(main|master|rank|rank0|primary|chief|leader|zero|coordinator|writer?|writes?|saver?|saves?|saving"
    r"|logger|tracker|recorder|wandb|tb|tensorboard|verbose|local)(_|\d|$)|should|is_first|is_root|root_(rank|proc)"
)
_GUARDED_NAME = re.compile(r"rank_?0|rank_?zero|main_process|master|main_only|main_rank|is_main")
WAITING = ("barrier", "synchronize", "wait_for_everyone")
_FLAGS = re.compile(
    r"((enable|is|use|with)_)?(ddp|dist|distributed|multi_?gpu|parallel)(_(enabled?|mode|training))?"
    r"|is_dist_avail_and_initialized|is_initialized|multiprocessing_distributed"
)
_COUNTS = set("n_gpu n_gpus ngpu ngpus num_gpu num_gpus nprocs num_processes device_count".split())


class Reach(IntEnum):
    """How far a chain of calls shows that every rank comes to a place."""

    UNKNOWN = 0
    """A condition may keep ranks away, or no chain is seen."""
    CALLED = 1
    """A chain without a possible guard, but nothing on it joins a process group."""
    JOINED = 2
    """Such a chain, on which the group is joined before."""


def is_on_every_rank(program: Program, node: ast.AST) -> bool:
    """Whether a chain of calls shows it, from a function that joins the group before it goes on."""
    return reach_of(program, node) is Reach.JOINED


def reach_of(program: Program, node: ast.AST) -> Reach:
    """How far it is shown that every rank comes to this place.

    def main():
        dist.init_process_group()
        print("start")  # joined
    """
    if may_be_guarded(program, node) or is_single_process(program, node):
        return Reach.UNKNOWN

    function = enclosing_function(node)
    if function is not None:
        reach = _reach_of_function(program, function)
    else:
        reach = Reach.UNKNOWN if program.source_of(node).is_notebook else Reach.CALLED

    is_joining = reach is Reach.CALLED and _joins_before(program, node)
    return Reach.JOINED if is_joining else reach


def _reach_of_function(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Reach:
    """How far it is shown that every rank calls a function."""
    answers = program.answers[_reach_of_function]
    if function not in answers:
        answers[function] = Reach.UNKNOWN  # for a function that calls itself
        answers[function] = _find_reach(program, function)

    reach: Reach = answers[function]
    return reach


def _find_reach(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Reach:
    """By its decorators, its name, and the calls of it."""
    if guards_of_decorators(program, function) or _GUARDED_NAME.search(function.name.lower()):
        return Reach.UNKNOWN

    calls = program.callers(function)[:MOST_CALLERS]
    if calls:
        return max(_reach_by(program, function, call) for call in calls)

    return Reach.CALLED if enclosing_class(function) is None else Reach.UNKNOWN


def _reach_by(program: Program, function: FunctionNode, call: ast.Call) -> Reach:
    """A process that a call starts has neither the conditions nor the group of its parent."""
    is_process = called_name(call) != "Thread" and function in program.started_functions(call)
    return Reach.CALLED if is_process else reach_of(program, call)


# Conditions that may keep ranks away.


def may_be_guarded(program: Program, node: ast.AST) -> bool:
    """Whether a condition on ranks is around it, or one whose names may be such.

    if writer is not None:
        writer.add_scalar("loss", loss)  # only rank 0 may have a writer
    """
    if any(rank_tests_at(program, node)) or takes_turns(program, node):
        return True

    tests = (test for test, _ in conditions(program, node))
    return any(says_distributed(program, test) is None and _names_guard(test) for test in tests)


def _names_guard(test: ast.expr) -> bool:
    """Whether a condition may be on ranks: by its words, or as `folder is not None`, where only
    some may have one.

    In `step % save_every` the divisor is a number of rounds.
    """
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
        return True

    operations = nodes_in(test, ast.BinOp)
    divisors = [part.right for part in operations if isinstance(part.op, ast.Mod)]

    names = nodes_in(test, ast.Name, ast.Attribute)
    words = [last_name(name) for name in names if name not in divisors]
    words += [str(constant.value) for constant in nodes_in(test, ast.Constant)]

    return "__name__" not in words and any(_GUARDING.search(word.lower()) for word in words)


def takes_turns(program: Program, node: ast.AST) -> bool:
    """`if rank != 0: dist.barrier()` before it: the others wait until the first is done."""
    for call in calls_beside(node):
        is_waiting = called_name(call) in WAITING and is_after(node, call)
        if is_waiting and any(rank_tests_at(program, call)):
            return True

    return False


# Joining the group.


def _joins_before(program: Program, node: ast.AST) -> bool:
    """Whether its function has joined the group when it comes there, or has read the launcher's
    variables."""
    for part in nodes_in(scope_of(node), ast.Call, ast.Subscript):
        is_before = is_after(node, part) or _is_evaluated_before(node, part)
        if not is_before or not joins(program, part):
            continue
        if not are_exclusive(program, part, node) and not is_dead(program, part):
            return True

    return False


def _is_evaluated_before(call: ast.AST, part: ast.AST) -> bool:
    """`Trainer(config)`, in `Trainer(config).fit()`"""
    return isinstance(call, ast.Call) and call in ancestors(part)


def joins(program: Program, part: ast.AST) -> bool:
    """Whether a call joins the group, or an expression reads a launcher's variable.

    Examples: `dist.init_process_group()`, `init_distributed(args)`, `os.environ["RANK"]`.
    """
    if isinstance(part, ast.Subscript):
        return _reads_variable(program, part)
    if not isinstance(part, ast.Call):
        return False

    name = program.name_of(part.func)
    if name == ACCELERATOR:  # tools of one process make one as well
        return "backward(" in program.source_of(part).text
    if name in _JOINING:
        return True

    function = program.function_of(part)
    if function is not None:
        return _joins_in(program, function)

    return _JOINING_NAME.search(called_name(part)) is not None


def _reads_variable(program: Program, part: ast.Subscript) -> bool:
    """`os.environ["RANK"]`, where it is read."""
    key = part.slice.value if isinstance(part.slice, ast.Constant) else None
    if key not in (*OF_VARIABLE, "WORLD_SIZE") or not isinstance(part.ctx, ast.Load):
        return False

    return program.name_of(part.value) == "os.environ"


def _joins_in(program: Program, function: FunctionNode) -> bool:
    """Whether a function joins the group, itself or by one that it calls."""
    answers = program.answers[_joins_in]
    if function not in answers:
        answers[function] = False  # for a function that calls itself
        inner = nodes_in(function, ast.Call, ast.Subscript)
        answers[function] = any(joins(program, part) for part in inner)

    return bool(answers[function])


# Conditions on the number of processes.


def is_single_process(program: Program, node: ast.AST) -> bool:
    """Whether a condition in its function says that there is one process."""
    for test, holds in conditions(program, node):
        for part, part_holds in split_condition(test, holds):
            if says_distributed(program, part) is (not part_holds):
                return True

    return False


def says_distributed(program: Program, test: ast.expr) -> bool | None:
    """True if the condition means several processes, False if it means one; None: something else.

    Examples: True of `args.distributed` and `world_size > 1`, False of `not args.distributed`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = says_distributed(program, test.operand)
        return None if inner is None else not inner

    if isinstance(test, ast.Constant):
        return bool(test.value)  # under `if 0:` there is nobody

    if isinstance(test, ast.BoolOp):
        deciding = isinstance(test.op, ast.And)
        answers = {says_distributed(program, part) for part in test.values}
        return deciding if deciding in answers else None

    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _said_by_comparison(program, test)

    if _FLAGS.fullmatch(_named(test)):
        return True

    values = program.assigned(test) if isinstance(test, ast.Name) else []
    is_computed = len(values) == 1 and isinstance(values[0], (ast.Compare, ast.Call))
    return says_distributed(program, values[0]) if is_computed else None


def _named(test: ast.expr) -> str:
    """`dist` of `opt.dist`, `opt["dist"]` and `opt.get("dist")`."""
    key = test.slice if isinstance(test, ast.Subscript) else None
    if isinstance(test, ast.Call) and called_name(test) == "get" and test.args:
        key = test.args[0]

    name = key.value if isinstance(key, ast.Constant) else last_name(getattr(test, "func", test))
    return str(name).lower().strip("_")


def _said_by_comparison(program: Program, test: ast.Compare) -> bool | None:
    """Whether a comparison means several processes, or one; None if it is about something else.

    Examples: `"RANK" in os.environ`, `args.launcher != "none"`, `local_rank != -1`,
    `torch.cuda.device_count() > 1`.
    """
    operator = test.ops[0]
    left = test.left

    if isinstance(operator, (ast.In, ast.NotIn)):
        is_variable = isinstance(left, ast.Constant) and left.value in (*OF_VARIABLE, "WORLD_SIZE")
        return isinstance(operator, ast.In) if is_variable else None

    values = program.values(test.comparators[0])
    constants = [value.value for value in values if isinstance(value, ConstantValue)]
    if _named(left) == "launcher" and constants in (["none"], [None]):
        return isinstance(operator, (ast.NotEq, ast.IsNot))

    is_rank = any(isinstance(value, Rank) for value in program.values(left))
    if is_rank and constants in ([-1], [None]):
        return isinstance(operator, (ast.NotEq, ast.IsNot, ast.Gt))

    if constants in ([1], [2], [0]) and _is_count(left):
        return isinstance(operator, (ast.Gt, ast.GtE, ast.NotEq))

    return None


def _is_count(expression: ast.expr) -> bool:
    """Whether it is a number of processes: `num_gpus`, `int(os.environ["WORLD_SIZE"])`."""
    if isinstance(expression, ast.Call) and called_name(expression) == "int" and expression.args:
        expression = expression.args[0]

    return _named(expression) in _COUNTS or is_world_size(expression)


# Which ranks the conditions select.


def is_main_only(tests: Guards) -> bool:
    """Whether these conditions select one process of the whole job."""
    kinds = {test.kind for test in tests if test.is_main and test.is_needed}
    return bool(kinds & {"global", "spawned"}) or {"local", "node"} <= kinds


def guards_of_decorators(
    program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Guards:
    """The conditions on ranks of a function's decorators, by their code or their name.

    @rank_zero_only
    def log(text): ...
    """
    tests: set[RankTest] = set()

    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        functions = [value.node for value in program.values(named) if isinstance(value, Function)]
        for decorating in functions:
            tests.update(_guards_in_wrapper(program, decorating))

        name = last_name(named).lower()
        if not functions and _GUARDED_NAME.search(name) and "first" not in name:
            tests.add(RankTest("local" if "local" in name else "global", True))

    return frozenset(tests)


def _guards_in_wrapper(program: Program, decorator: FunctionNode) -> Guards:
    """The conditions under which a decorator calls its function.

    def only_on_main(function):
        def wrapper(*args):
            if rank == 0:
                return function(*args)
        return wrapper

    Also of one that `only_on(rank)` makes, another function around these.
    """
    functions = [decorator, *nodes_in(decorator, *FUNCTIONS, into_functions=True)]
    parameters = {parameter.arg for function in functions for parameter in function.args.args}

    tests: list[Guards] = []
    for call in nodes_in(decorator, ast.Call, into_functions=True):
        if isinstance(call.func, ast.Name) and call.func.id in parameters:
            tests.append(frozenset(rank_tests_at(program, call)))

    return frozenset.intersection(*tests) if tests else frozenset()


def guards(program: Program, node: ast.AST, depth: int = 0) -> Guards:
    """The conditions on ranks around it, and those around all calls of its function.

    if rank == 0:
        evaluate()  # what `evaluate` calls is for rank 0, if nothing else calls it
    """
    tests = frozenset(rank_tests_at(program, node))
    function = enclosing_function(node)
    if function is None or depth == DEEPEST:
        return tests

    tests |= guards_of_decorators(program, function)
    calls = program.callers(function)[:MOST_CALLERS]
    around = [guards(program, call, depth + 1) for call in calls]
    return tests | frozenset.intersection(*around) if around else tests
