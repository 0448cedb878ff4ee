"""Which numbers are ranks, and which conditions hold on some ranks only."""

from __future__ import annotations

import ast

from drumline.lint.program.value import NOTHING, Known, Rank, RankTest, Value, Values

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
# Where nothing else is known of a name.
OF_NAME = {
    "rank": "global",
    "global_rank": "global",
    "world_rank": "global",
    "ddp_rank": "global",
    "dist_rank": "global",
    "local_rank": "local",
    "localrank": "local",
    "ddp_local_rank": "local",
    "node_rank": "node",
    "group_rank": "node",
}
MAIN_NAMES = {
    "is_main",
    "is_main_process",
    "is_main_rank",
    "is_master",
    "is_master_process",
    "is_rank0",
    "is_rank_0",
    "is_rank_zero",
    "is_global_zero",
    "is_primary",
    "is_chief",
    "main_process",
    "master_process",
    "on_main_process",
    "rank_zero",
}
LOCAL_MAIN_NAMES = {"is_local_main_process", "is_local_master", "is_local_zero", "is_local_main"}


def by_name(name: str) -> Values:
    """What a name says, of which nothing else is known."""
    plain = name.lower().strip("_").removeprefix("get_")
    if plain in OF_NAME:
        return frozenset({Rank(OF_NAME[plain])})
    if plain in MAIN_NAMES:
        return frozenset({RankTest("global", True)})
    return frozenset({RankTest("local", True)}) if plain in LOCAL_MAIN_NAMES else NOTHING


def by_variable(name: object) -> Values:
    """What a variable of the environment holds."""
    kind = OF_VARIABLE.get(name) if isinstance(name, str) else None
    return frozenset({Rank(kind)}) if kind else NOTHING


def computed(operator: ast.operator, left: Values, right: Values) -> Values:
    """What comes of calculating with ranks: `node_rank * 8 + local_rank` is a global one, `rank % 8` a local one."""
    kinds = {value.kind for value in left | right if isinstance(value, Rank)}
    if not kinds:
        return NOTHING
    if isinstance(operator, ast.Mod):
        return frozenset({Rank("local")})
    if isinstance(operator, ast.FloorDiv):
        return frozenset({Rank("node")})
    if isinstance(operator, ast.Add | ast.Mult):
        return frozenset({Rank("global" if kinds & {"node", "global"} else min(kinds))})
    return NOTHING


def flipped(values: Values) -> Values:
    """The opposite; `not rank` asks for rank 0."""
    turned: set[Value] = set()
    for value in values:
        if isinstance(value, RankTest):
            turned.add(RankTest(value.kind, None if value.is_main is None else not value.is_main))
        elif isinstance(value, Rank):
            turned.add(RankTest(value.kind, True))
        elif isinstance(value, Known):
            turned.add(Known(not value.value))
    return frozenset(turned)


def compared(operator: ast.cmpop, left: Values, right: Values) -> Values:
    """What a comparison of a rank tells."""
    tests: set[Value] = set()
    for one, other, is_turned in ((left, right, False), (right, left, True)):
        kinds = [value.kind for value in one if isinstance(value, Rank)]
        if kinds:
            meant = _who(operator, other, is_turned)
            tests.update(RankTest(kind, IS_MAIN[meant]) for kind in kinds if meant in IS_MAIN)
    return frozenset(tests)


IS_MAIN = {"the main one": True, "the others": False, "some": None}


def _who(operator: ast.cmpop, other: Values, is_turned: bool) -> str:
    """Is meant by `rank OPERATOR other`; "all" where it is not about one rank."""
    numbers = {value.value for value in other if isinstance(value, Known)}
    if numbers & {-1, None} and 0 not in numbers:
        return "all"  # `rank != -1`: whether there are ranks at all
    zero = numbers == {0} or numbers == {0, -1}
    if isinstance(operator, ast.Eq | ast.Is | ast.In):
        return "the main one" if zero else "some"
    if isinstance(operator, ast.NotEq | ast.IsNot | ast.NotIn):
        return "the others" if zero else "some"
    is_greater = isinstance(operator, ast.Gt | ast.GtE) != is_turned
    is_strict = isinstance(operator, ast.Gt | ast.Lt)
    if is_greater:
        return "all" if zero and not is_strict else "the others" if zero or numbers == {1} else "some"
    return "the main one" if (zero and not is_strict) or (numbers == {1} and is_strict) else "some"
