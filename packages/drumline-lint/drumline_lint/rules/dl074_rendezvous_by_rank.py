"""DL074: ranks start a group with numbers that do not fit together."""

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


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Ranks that are the same everywhere, ports that have the rank in them, variables that are set
    as numbers or too late."""
    inits = list(program.calls(source, INIT))
    for call in inits:
        if message := _about_rank(program, call):
            severity = Severity.WARNING if _is_of_nodes(program, call) else None
            yield RULE.at(source, call, message, severity=severity)
    for setting in settings(program, source):
        origins = written_values(program, setting.value)
        texts = [ast.unparse(origin) for origin in origins]
        if origins and all(_is_number(program, origin) for origin in origins):
            message = (
                f"{setting.name} is set to a number: os.environ takes text, and raises a TypeError"
            )
            yield RULE.at(
                source, setting.node, message, fix="write str(...)", severity=Severity.WARNING
            )
        elif setting.name == "RANK" and texts and all("SLURM_LOCALID" in text for text in texts):
            message = "the local rank is given as the rank: on a second host it is there twice"
            yield RULE.at(source, setting.node, message)
        elif setting.name == "MASTER_PORT" and _is_own(program, setting, inits):
            message = "every rank takes a port of its own, and they do not find each other"
            yield RULE.at(source, setting.node, message, severity=Severity.WARNING)
        elif _is_of_launcher(program, source, setting):
            message = (
                f"torchrun sets {setting.name} for each rank, and this replaces it: "
                "all ranks have the same"
            )
            fix = "leave it as the launcher sets it"
            yield RULE.at(source, setting.node, message, fix=fix, severity=Severity.WARNING)
    yield from _other_counts(program, source)


def _is_of_launcher(program: Program, source: Source, setting: Setting) -> bool:
    """Whether a constant replaces, in any case, what torchrun has set for several ranks."""
    is_started = any(
        launch.is_torchrun and processes_per_node(launch) != 1
        for launch in program.launches_of(source)
    )
    is_of_rank = setting.name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    is_constant = is_of_rank and isinstance(setting.value, ast.Constant)
    return is_started and is_constant and not any(conditions(program, setting.node))


def _other_counts(program: Program, source: Source) -> Iterator[Finding]:
    """`mp.spawn(main, args=(world_size,), nprocs=2)`, where main joins with another world size."""
    for call in program.calls(source, "torch.multiprocessing.spawn"):
        count = argument(call, 2, "nprocs")
        started = program.started_functions(call)
        sizes = [
            argument(init, 3, "world_size")
            for init in program.all_calls(INIT)
            if {enclosing_function(init), *_callers(program, init)} & {*started}
        ]
        for size in sizes:
            if count is not None and _differ(program.values(count), program.values(size)):
                message = (
                    f"{source.code(count)} processes are spawned, and the world size is another "
                    "number: init_process_group waits for ranks that never start"
                )
                fix = "give nprocs and world_size the same number"
                yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _callers(program: Program, init: ast.Call) -> list[ast.AST | None]:
    """The functions that call the one that joins the group."""
    function = enclosing_function(init)
    return [enclosing_function(call) for call in program.callers(function)] if function else []


def _differ(count: Values, size: Values) -> bool:
    """Whether they are two constants, or a constant and the number of GPUs."""
    if len(count) != 1 or len(size) != 1 or count == size:
        return False
    kinds = [_kind(value) for value in (*count, *size)]
    return all(kinds) and "constant" in kinds


def _kind(value: Value) -> str:
    if isinstance(value, ConstantValue):
        return "constant" if isinstance(value.value, int) and value.value > 1 else ""
    is_count = isinstance(value, CallResult) and value.name == "torch.cuda.device_count"
    return "count" if is_count else ""


def _is_number(program: Program, origin: ast.expr) -> bool:
    if isinstance(origin, ast.Call):
        return program.name_of(origin.func) in ("int", "len", "torch.cuda.device_count")
    return isinstance(origin, ast.Constant) and type(origin.value) is int


def _is_own(program: Program, setting: Setting, inits: list[ast.Call]) -> bool:
    """`str(29500 + rank)`, and a port that the function looks for which starts the group."""
    value = setting.value
    is_started = any(scope_of(init) is scope_of(setting.node) for init in inits)
    calls = nodes_in(value, ast.Call) if value is not None and is_started else []
    is_seeded = any_text_near(program, program.source_of(setting.node), "seed(")
    draws = () if is_seeded else _DRAWS
    if any(
        "free_port" in called_name(call) or program.name_of(call.func) in draws for call in calls
    ):
        return not any(conditions(program, setting.node))
    sums = nodes_in(value, ast.BinOp, ast.FormattedValue) if value is not None else []
    names = [name for part in sums for name in nodes_in(part, ast.Name, ast.Attribute)]
    kinds = {v.kind for name in names for v in program.values(name) if isinstance(v, Rank)}
    return bool(kinds & {"global", "local", "spawned"})


def _is_of_nodes(program: Program, call: ast.Call) -> bool:
    """Whether the world size has a factor for nodes, of which there are several by default."""
    factors = [
        name
        for origin in _sizes(program, argument(call, 3, "world_size"))
        for name in nodes_in(origin, ast.Name, ast.Attribute)
        if "node" in ast.unparse(name)
    ]
    counts = [count for factor in factors for count in constants(program, factor)]
    return any(isinstance(count, int) and count > 1 for count in counts)


def _sizes(program: Program, size: ast.expr | None) -> list[ast.expr]:
    """What the world size is, for an attribute wherever it is set."""
    origins = written_values(program, size)
    if not isinstance(size, ast.Attribute):
        return origins
    indexes = [program.index(file) for file in program.sources]
    pairs = [pair for index in indexes for pair in index.attributes.get(size.attr, ())]
    values = [binding.value for _, binding in pairs if binding.value is not None]
    return [*origins, *values]


def _about_rank(program: Program, call: ast.Call) -> str:
    rank = argument(call, 4, "rank")
    size = argument(call, 3, "world_size")
    sizes = [getattr(origin, "value", 0) for origin in written_values(program, size)]
    is_several = any(isinstance(number, int) and number > 1 for number in sizes)
    if isinstance(rank, ast.Constant) and isinstance(rank.value, int) and is_several:
        return f"rank={rank.value} on every rank: the others never join"
    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    if any(isinstance(origin, ast.BinOp) for origin in written_values(program, rank)):
        return ""
    texts = [ast.unparse(origin) for origin in _sizes(program, size)]
    has_nodes = any("*" in text and "node" in text for text in texts)
    if kinds in ({"local"}, {"spawned"}) and has_nodes:
        return "the local rank is given as the rank: on a second host it is there twice"
    return ""
