"""DL074: ranks start a group with numbers that do not fit together.

All ranks run the same code: what they are to agree on must be the same for all of them, and what
tells them apart must come from their launcher.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.hosts import Setting, settings
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import constants, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import called_name, enclosing_function, nodes_in, scope_of
from drumline_lint.program.value import CallResult, ConstantValue, Rank, Value, Values
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.source import Source

RULE = rule("DL074", in_tests=False)

_DRAWS = ("random.randint", "random.randrange", "numpy.random.randint")
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

_DEVICE_COUNT = "torch.cuda.device_count"
_TWICE = "the local rank is given as the rank: on a second host it is there twice"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Ranks that are the same everywhere, ports that have the rank in them, variables that are set
    as numbers or too late.

    For example:

        os.environ["MASTER_PORT"] = str(29500 + rank)
        dist.init_process_group("nccl", rank=0, world_size=4)
    """
    inits = list(program.calls(source, INIT))
    for call in inits:
        if message := _about_rank(program, call):
            severity = Severity.WARNING if _is_of_nodes(program, call) else None
            yield RULE.at(source, call, message, severity=severity)

    for setting in settings(program, source):
        yield from _of_setting(program, source, setting, inits)

    yield from _other_counts(program, source)


# Arguments of init_process_group


def _about_rank(program: Program, call: ast.Call) -> str:
    """What is wrong with the rank of a call that joins the group; empty if nothing is.

    For example:

        dist.init_process_group("nccl", rank=local_rank, world_size=nodes * gpus)
    """
    rank = argument(call, 4, "rank")
    size = argument(call, 3, "world_size")
    if isinstance(rank, ast.Constant) and isinstance(rank.value, int):
        numbers = [getattr(origin, "value", 0) for origin in written_values(program, size)]
        if any(isinstance(number, int) and number > 1 for number in numbers):
            return f"rank={rank.value} on every rank: the others never join"

    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    if kinds not in ({"local"}, {"spawned"}):
        return ""
    if any(isinstance(origin, ast.BinOp) for origin in written_values(program, rank)):
        return ""

    texts = [ast.unparse(origin) for origin in _sizes(program, size)]
    has_nodes = any("*" in text and "node" in text for text in texts)
    return _TWICE if has_nodes else ""


def _is_of_nodes(program: Program, call: ast.Call) -> bool:
    """Whether the world size has a factor for nodes, of which there are several by default.

    For example:

        parser.add_argument("--nodes", default=2)
        world_size = args.nodes * args.gpus
    """
    counts = [
        count
        for origin in _sizes(program, argument(call, 3, "world_size"))
        for factor in nodes_in(origin, ast.Name, ast.Attribute)
        if "node" in ast.unparse(factor)
        for count in constants(program, factor)
    ]
    return any(isinstance(count, int) and count > 1 for count in counts)


def _sizes(program: Program, size: ast.expr | None) -> list[ast.expr]:
    """What the world size is, for an attribute wherever it is set.

    It is `args.nodes * args.gpus` for `args.world_size`, after:

        args.world_size = args.nodes * args.gpus
    """
    origins = [*written_values(program, size)]
    if not isinstance(size, ast.Attribute):
        return origins

    for source in program.sources:
        for _, binding in program.index(source).attributes.get(size.attr, ()):
            if binding.value is not None:
                origins.append(binding.value)
    return origins


# Variables of the environment


def _of_setting(
    program: Program, source: Source, setting: Setting, inits: list[ast.Call]
) -> Iterator[Finding]:
    """A variable that is set to what no rank can use.

    For example:

        os.environ["WORLD_SIZE"] = 4
        os.environ["RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["MASTER_PORT"] = str(random.randint(20000, 30000))
    """
    name = setting.name
    fix = ""
    severity: Severity | None = Severity.WARNING
    origins = written_values(program, setting.value)

    if origins and all(_is_number(program, origin) for origin in origins):
        message = f"{name} is set to a number: os.environ takes text, and raises a TypeError"
        fix = "write str(...)"
    elif name == "RANK" and origins and all(map(_is_local_rank, origins)):
        message = _TWICE
        severity = None
    elif name == "MASTER_PORT" and _is_own_port(program, setting, inits):
        message = "every rank takes a port of its own, and they do not find each other"
    elif _is_of_launcher(program, source, setting):
        message = (
            f"torchrun sets {name} for each rank, and this replaces it: all ranks have the same"
        )
        fix = "leave it as the launcher sets it"
    else:
        return

    yield RULE.at(source, setting.node, message, fix=fix, severity=severity)


def _is_number(program: Program, origin: ast.expr) -> bool:
    """`4`, and `torch.cuda.device_count()`"""
    if isinstance(origin, ast.Call):
        return program.name_of(origin.func) in ("int", "len", _DEVICE_COUNT)
    return isinstance(origin, ast.Constant) and type(origin.value) is int


def _is_local_rank(origin: ast.expr) -> bool:
    """`os.environ["SLURM_LOCALID"]`"""
    return "SLURM_LOCALID" in ast.unparse(origin)


def _is_own_port(program: Program, setting: Setting, inits: list[ast.Call]) -> bool:
    """Whether it has the rank in it, or the function looks for it which starts the group.

    For example:

        os.environ["MASTER_PORT"] = str(29500 + rank)
        os.environ["MASTER_PORT"] = str(find_free_port())
        dist.init_process_group("nccl")
    """
    value = setting.value
    if value is None:
        return False

    if any(scope_of(init) is scope_of(setting.node) for init in inits):
        is_seeded = any_text_near(program, program.source_of(setting.node), "seed(")
        draws = () if is_seeded else _DRAWS
        for call in nodes_in(value, ast.Call):
            if "free_port" in called_name(call) or program.name_of(call.func) in draws:
                return not any(conditions(program, setting.node))

    sums = nodes_in(value, ast.BinOp, ast.FormattedValue)
    names = [name for part in sums for name in nodes_in(part, ast.Name, ast.Attribute)]
    meanings = [meaning for name in names for meaning in program.values(name)]
    kinds = {meaning.kind for meaning in meanings if isinstance(meaning, Rank)}
    return not kinds.isdisjoint(("global", "local", "spawned"))


def _is_of_launcher(program: Program, source: Source, setting: Setting) -> bool:
    """Whether a constant replaces, in any case, what torchrun has set for several ranks.

    In a file that `torchrun --nproc-per-node=4` starts:

        os.environ["LOCAL_RANK"] = "0"
    """
    if setting.name not in _OF_RANK or not isinstance(setting.value, ast.Constant):
        return False

    is_started = any(
        launch.is_torchrun and processes_per_node(launch) != 1
        for launch in program.launches_of(source)
    )
    return is_started and not any(conditions(program, setting.node))


# Processes that are spawned


def _other_counts(program: Program, source: Source) -> Iterator[Finding]:
    """Processes that are spawned, and join a group of another size.

    For example:

        def main(rank):
            dist.init_process_group("nccl", rank=rank, world_size=4)

        mp.spawn(main, nprocs=2)
    """
    for call in program.calls(source, "torch.multiprocessing.spawn"):
        count = argument(call, 2, "nprocs")
        started = program.started_functions(call)
        if count is None:
            continue

        for init in program.all_calls(INIT):
            if not {enclosing_function(init), *_callers(program, init)} & {*started}:
                continue

            size = argument(init, 3, "world_size")
            if _differ(program.values(count), program.values(size)):
                message = (
                    f"{source.code(count)} processes are spawned, and the world size is another "
                    "number: init_process_group waits for ranks that never start"
                )
                fix = "give nprocs and world_size the same number"
                yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _callers(program: Program, init: ast.Call) -> list[ast.AST | None]:
    """The functions that call the one that joins the group.

    It is `main` here:

        def setup(rank):
            dist.init_process_group("nccl", rank=rank, world_size=4)

        def main(rank):
            setup(rank)
    """
    function = enclosing_function(init)
    return [enclosing_function(call) for call in program.callers(function)] if function else []


def _differ(count: Values, size: Values) -> bool:
    """Whether they are two constants, or a constant and the number of GPUs.

    `nprocs=2` and `world_size=4`; `nprocs=torch.cuda.device_count()` and `world_size=4`.
    """
    if len(count) != 1 or len(size) != 1 or count == size:
        return False

    kinds = [_kind(value) for value in (*count, *size)]
    return all(kinds) and "constant" in kinds


def _kind(value: Value) -> str:
    """`constant` of 4, `count` of `torch.cuda.device_count()`; empty for all else."""
    if isinstance(value, ConstantValue):
        return "constant" if isinstance(value.value, int) and value.value > 1 else ""

    is_count = isinstance(value, CallResult) and value.name == _DEVICE_COUNT
    return "count" if is_count else ""
