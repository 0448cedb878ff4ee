"""Which numbers are ranks, and which conditions hold on some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from drumline_lint.program.value import (
    NOTHING,
    ConstantValue,
    Rank,
    RankTest,
    Value,
    Values,
    constants_in,
    only,
)

# The kind of rank (see `Rank`) that an environment variable, a function and a name stand for.
OF_VARIABLE = {
    "RANK": "global",
    "LOCAL_RANK": "local",
    "GROUP_RANK": "node",
    "NODE_RANK": "node",
    "SLURM_PROCID": "global",
    "SLURM_LOCALID": "local",
    "SLURM_NODEID": "node",
    "OMPI_COMM_WORLD_RANK": "global",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local",
    "PMI_RANK": "global",
    "MPI_LOCALRANKID": "local",
}
OF_FUNCTION = {
    "torch.distributed.get_rank": "global",
    "torch.distributed.get_node_local_rank": "local",
    "horovod.torch.rank": "global",
    "horovod.torch.local_rank": "local",
}
# For names about which nothing else is known.
OF_NAME = {
    name: kind
    for kind, names in {
        "global": "rank global_rank world_rank ddp_rank dist_rank my_rank rank_id process_index process_rank",
        "local": "local_rank localrank ddp_local_rank local_process_index gpu gpu_id gpu_index gpu_idx",
        "node": "node_rank group_rank node_id",
    }.items()
    for name in names.split()
}
# `is_main_process`, `rank_zero_only`.
_MAIN = re.compile(
    r"""(is_|on_|am_i_)?(the_)?(global_|world_)?
    (main|master|primary|chief|leader|coordinator|root|rank_?0|rank_?zero|global_zero|first_rank|world_process_zero)
    (_process|_rank|_worker|_proc|_only)?""",
    re.VERBOSE,
)
# `is_local_main_process`, `local_rank0`.
_LOCAL_MAIN = re.compile(
    r"(is_|on_)?local_(main|master|primary|rank_?0|rank_?zero|zero|process_zero|chief|leader)(_process|_rank)?"
)
# Groups of ranks that share a model, a batch or a stage: `tp_rank`, `data_parallel_rank`.
_OF_GROUP = re.compile(
    r"(tp|dp|pp|cp|ep|sp|mp|((tensor|data|pipeline|context|expert|sequence|model)_)+parallel)_(rank|local_rank)"
)
# Objects that are groups: `dp_group`, `device_mesh`.
_GROUPS = re.compile(r"(.*_)?(group|pg|mesh)")
# Plain words that mean many other things too.
_VAGUE = {"main", "master", "primary", "root", "leader", "chief", "coordinator", "the_main"}
# Parts of names that say whether there are several processes, and those that say the opposite.
_BEING_DISTRIBUTED = re.compile(
    r"dist(?!anc|ill|rib(?!uted))|ddp|initialized|world_size|rank|num_processes|n_?gpus?|nproc|parallel|single"
)
_OF_ONE_PROCESS = re.compile(r"single|disable|(^|_)(no|not|non|without)_")
# `world_size`, `num_processes`; not `local_world_size`.
_WORLD_SIZES = re.compile(r"world_?size|num_(processes|replicas|ranks)|^nprocs$")
_OF_ONE_HOST = re.compile(r"local|per_(node|host)")


@cache
def by_name(name: str) -> Values:
    """The meaning of a name about which nothing else is known."""
    plain = name.lower().strip("_").removeprefix("get_")
    if plain in OF_NAME:
        return only(Rank(OF_NAME[plain]))
    if _OF_GROUP.fullmatch(plain):
        return only(Rank("group"))

    if plain in _VAGUE:
        return NOTHING
    if _MAIN.fullmatch(plain):
        return only(RankTest("global", True))
    if _LOCAL_MAIN.fullmatch(plain):
        return only(RankTest("local", True))

    return NOTHING


@cache
def of_library(name: str) -> Values:
    """The meaning of a library's name, except torch's: `timm.utils.is_primary`."""
    if name in OF_FUNCTION or name.startswith("torch."):
        return NOTHING

    last = name.rpartition(".")[2]
    is_vague = last in ("rank", "gpu", "node_id") and name.count(".") > 1
    return NOTHING if is_vague else by_name(last)


def of_member(makers: set[str], owner: str, name: str) -> Values:
    """The meaning of an attribute's name, by what made the object and the object's name.

    - `parser.parse_args().rank` is a global rank
    - `Accelerator().is_main_process` is a test for rank 0
    - `data_group.rank()` is a rank within a group
    """
    if name == "rank" and _GROUPS.fullmatch(owner.lower()):
        return only(Rank("group"))

    if any(maker.startswith("torch.") for maker in makers):
        # a device mesh's
        return only(Rank("group")) if name == "get_local_rank" else NOTHING

    return by_name(name)


def by_variable(name: object) -> Values:
    """The meaning of an environment variable."""
    kind = OF_VARIABLE.get(name) if isinstance(name, str) else None
    return only(Rank(kind)) if kind else NOTHING


def computed(operator: ast.operator, left: Values, right: Values) -> Values:
    """The result of arithmetic with ranks.

    - `node_rank * 8 + local_rank` is a global rank
    - `rank % 8` is a local one
    - `rank // 8` is the number of a node
    """
    kinds = {value.kind for value in left | right if isinstance(value, Rank)}
    if not kinds:
        return NOTHING

    if isinstance(operator, ast.Mod):
        return only(Rank("local"))
    if isinstance(operator, ast.FloorDiv):
        return only(Rank("node"))
    if not isinstance(operator, (ast.Add, ast.Mult)):
        return NOTHING

    is_global = bool(kinds & {"node", "global"})
    return only(Rank("global" if is_global else min(kinds)))


def is_about_being_distributed(expression: ast.expr) -> bool:
    """Whether it tests if there are several processes: `not dist.is_initialized()`, `world_size ==
    1`."""
    words = [_plain_name(node) for node in ast.walk(expression)]
    return any(_BEING_DISTRIBUTED.search(word.lower()) for word in words)


def is_world_size(node: ast.AST) -> bool:
    """Whether it is the world size, by its name; `rank < world_size` holds on every rank, unlike
    one host's number."""
    if isinstance(node, ast.Call):
        node = node.func

    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value == "WORLD_SIZE"

    name = _plain_name(node).lower()
    return bool(_WORLD_SIZES.search(name)) and not _OF_ONE_HOST.search(name)


def _plain_name(node: ast.AST) -> str:
    """`rank` of `rank` and of `args.rank`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_other_number(default: Values) -> bool:
    """Whether a parameter named `rank` is another number: the rank of a matrix has a default such
    as 4 or 8."""
    return any(constant not in (0, -1, None, "", "0") for constant in constants_in(default))


def combined(test: ast.BoolOp, operands: Sequence[Values]) -> Values:
    """The tests that `and` and `or` combine.

    - `rank == 0 and verbose`: only rank 0 passes, but not always
    - `rank == 0 or always`: rank 0 passes, and others may
    - `rank == 0 or rank == 1`: some ranks pass
    - `world_size > 1 and rank == 0`: as `rank == 0`; whether the code is distributed does not count
    - `distributed or rank == 0`: unless that lets all ranks in
    """
    is_or = isinstance(test.op, ast.Or)
    num_with_ranks = 0
    num_counting = 0

    for operand, values in zip(test.values, operands, strict=True):
        has_rank = any(isinstance(value, (RankTest, Rank)) for value in values)
        num_with_ranks += has_rank
        num_counting += has_rank or _counts(operand, is_or)

    combination: Values = frozenset().union(*operands)
    if num_counting <= 1 or not num_with_ranks:
        return combination
    if not is_or:
        return _changed(combination, is_enough=False)
    if num_with_ranks < num_counting:
        return _changed(combination, is_needed=False)

    # `rank == 0 or rank == 1`: some ranks, and which is not known.
    tests = {value for value in combination if isinstance(value, RankTest)}
    if len(tests) < 2:
        return combination

    some = frozenset(RankTest(rank_test.kind, None, rank_test.is_needed) for rank_test in tests)
    return some | (combination - tests)


def _counts(operand: ast.expr, is_or: bool) -> bool:
    """Whether an operand that is about no rank changes which ranks pass."""
    return not is_about_being_distributed(operand) or (is_or and _lets_all_in(operand))


def _lets_all_in(flag: ast.expr) -> bool:
    """A plain flag or call; not one that is true for a single process."""
    name = _plain_name(flag.func if isinstance(flag, ast.Call) else flag)
    return bool(name) and not _OF_ONE_PROCESS.search(name.lower())


def _changed(values: Values, **changes: Any) -> Values:
    """The values with their tests changed."""
    return frozenset(
        replace(value, **changes) if isinstance(value, RankTest) else value for value in values
    )


def negated(values: Values) -> Values:
    """The opposite: of `rank == 0` all other ranks; `not rank` selects rank 0."""
    turned: set[Value] = set()

    for value in values:
        if isinstance(value, RankTest):
            is_main = None if value.is_main is None else not value.is_main
            turned.add(RankTest(value.kind, is_main, value.is_enough, value.is_needed))
        elif isinstance(value, Rank):
            turned.add(RankTest(value.kind, True))
        elif isinstance(value, ConstantValue):
            turned.add(ConstantValue(not value.value))

    return frozenset(turned)


def compared(operator: ast.cmpop, left: Values, right: Values) -> Values:
    """The ranks that a comparison selects.

    `rank == 0` and `is_main is True` select the main one, `0 != rank` the others, `rank < 4` some,
    and `rank >= 0` is no test of ranks.
    """
    tests: set[Value] = set(_compared_tests(operator, left, right))

    for side, other_side, is_turned in ((left, right, False), (right, left, True)):
        kinds = [value.kind for value in side if isinstance(value, Rank)]
        if not kinds:
            continue
        selected = _who(operator, other_side, is_turned)
        if selected in IS_MAIN:
            tests.update(RankTest(kind, IS_MAIN[selected]) for kind in kinds)

    return frozenset(tests)


def _compared_tests(operator: ast.cmpop, left: Values, right: Values) -> Values:
    """`is_main is True`, `is_main == False`."""
    constants = constants_in(right)
    if len(constants) != 1 or not isinstance(constants[0], bool):
        return NOTHING

    tests = frozenset(value for value in left if isinstance(value, RankTest))
    is_equal = isinstance(operator, (ast.Eq, ast.Is))
    return tests if is_equal == constants[0] else negated(tests)


IS_MAIN = {"the main one": True, "the others": False, "some": None}


def _who(operator: ast.cmpop, compared_with: Values, is_turned: bool) -> str:
    """Which ranks `rank OPERATOR other` selects; "all" if it does not select some."""
    numbers = set(map(_number, constants_in(compared_with)))
    if numbers & {-1, None} and 0 not in numbers:
        return "all"  # `rank != -1`: whether there are ranks at all

    is_zero = 0 in numbers and numbers <= {0, -1, None}
    if isinstance(operator, (ast.Eq, ast.Is, ast.In)):
        return "the main one" if is_zero else "some"
    if isinstance(operator, (ast.NotEq, ast.IsNot, ast.NotIn)):
        return "the others" if is_zero else "some"

    is_greater = isinstance(operator, (ast.Gt, ast.GtE)) != is_turned
    is_strict = isinstance(operator, (ast.Gt, ast.Lt))
    if is_zero and is_strict != is_greater:
        return "all"  # `rank >= 0`, and `rank < 0`, which none is
    if is_greater:
        return "the others" if is_zero or numbers == {1} else "some"

    return "the main one" if is_zero or (numbers == {1} and is_strict) else "some"


def _number(value: object) -> object:
    """`os.environ["RANK"] == "0"` compares text."""
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value
