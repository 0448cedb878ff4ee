"""DL074: ranks start a group with numbers that do not fit together."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.hosts import Setting, settings
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, INIT
from drumline_lint.program.origins import depends_on_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function, last_name, nodes_in, parent_of, position
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source

RULE = rule("DL074", in_tests=False)
_DRAWS = ("random.randint", "random.randrange", "random.choice", "numpy.random.randint")
_NUMBERS = ("int", "len", "torch.cuda.device_count", "torch.distributed.get_rank")
_OWN_PORT = "every rank takes a port of its own, and they do not find each other"
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Ports that every rank draws, ranks that are the same everywhere, variables that are set too
    late."""
    inits = list(program.calls(source, INIT))
    for call in inits:
        is_alone = program.values(argument(call, 3, "world_size")) == {ConstantValue(1)}
        address = None if is_alone else argument(call, 1, "init_method")
        message = _about_ports(program, call, address) or _about_rank(program, call)
        if message:
            yield RULE.at(source, call, message)
        elif _is_local_of_all(program, argument(call, 4, "rank"), argument(call, 3, "world_size")):
            message = "the local rank is given as the rank: on a second host it is there twice"
            yield RULE.at(source, call, message, severity=Severity.NOTE)
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        if message := _about_sampler(program, call):
            fix = "leave out num_replicas and rank"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.NOTE)
    for setting in settings(program, source):
        if _is_number(program, setting.value):
            message = (
                f"{setting.name} is set to a number: os.environ takes text, and raises a TypeError"
            )
            yield RULE.at(source, setting.node, message, fix="write str(...)")
        if setting.name not in _ADDRESS or any(rank_tests_at(program, setting.node)):
            continue
        message = _about_ports(program, setting.node, setting.value) or _about_setting(
            program, setting
        )
        is_late = any(_is_before(program, init, setting.node) for init in inits)
        if not message and is_late and setting.name.startswith("MASTER"):
            message = f"{setting.name} is set after the group has been initialized"
        if message:
            yield RULE.at(source, setting.node, message)


def _about_setting(program: Program, setting: Setting) -> str:
    """A port that has the rank in it, added here, and a rank that only counts those of one host; each
    of several jobs may get a port from its caller."""
    if setting.name == "MASTER_PORT" and depends_on_rank(program, setting.value):
        kinds = {
            value.kind
            for part in parts(program, setting.value)
            if enclosing_function(part) is enclosing_function(setting.node)
            and isinstance(parent_of(part), ast.BinOp | ast.FormattedValue)
            for value in program.values(part)
            if isinstance(value, Rank)
        }
        return _OWN_PORT if kinds & {"global", "local", "spawned"} else ""
    texts = [ast.unparse(origin) for origin in written_values(program, setting.value)]
    if setting.name == "RANK" and texts and all("SLURM_LOCALID" in text for text in texts):
        return "the local rank is given as the rank: on a second host it is there twice"
    return ""


def _is_number(program: Program, value: ast.expr | None) -> bool:
    origins = written_values(program, value)
    return bool(origins) and all(
        (isinstance(origin, ast.Constant) and type(origin.value) is int)
        or (isinstance(origin, ast.Call) and program.name_of(origin.func) in _NUMBERS)
        for origin in origins
    )


def _about_ports(program: Program, node: ast.AST, value: ast.expr | None) -> str:
    """What is wrong with a port that a rank draws or looks for by itself."""
    names = nodes_in(value, ast.Name) if value is not None else []
    bindings = [binding for name in names for binding in program.bindings(name)]
    if any(binding.kind == "parameter" for binding in bindings):
        return ""  # whoever starts the ranks gives it to all
    calls = [part for part in parts(program, value) if isinstance(part, ast.Call)]
    if any("bcast" in (last := last_name(call.func)) or "broadcast" in last for call in calls):
        return ""  # all get that of one rank
    draws = [
        call
        for call in calls
        if (program.name_of(call.func) in _DRAWS or "free_port" in last_name(call.func).lower())
        and not any(conditions(program, call))
    ]
    if is_on_every_rank(program, node) and any(is_on_every_rank(program, call) for call in draws):
        return _OWN_PORT
    return ""


def _about_rank(program: Program, call: ast.Call) -> str:
    rank = argument(call, 4, "rank")
    world_size = written_values(program, argument(call, 3, "world_size"))
    sizes = [size.value for size in world_size if isinstance(size, ast.Constant)]
    is_several = any(isinstance(size, int) and size > 1 for size in sizes)
    if isinstance(rank, ast.Constant) and isinstance(rank.value, int) and is_several:
        return f"rank={rank.value} on every rank: the others never join"
    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    if kinds in ({"local"}, {"spawned"}) and _counts_nodes(program, call):
        return "the local rank is given as the rank: on a second host it is there twice"
    return ""


def _counts_nodes(program: Program, call: ast.Call) -> bool:
    """Whether the world size is a product with the number of nodes, wherever that is set."""
    size = argument(call, 3, "world_size")
    origins: list[ast.expr | None] = [*written_values(program, size)]
    if isinstance(size, ast.Attribute):
        indexes = [program.index(file) for file in program.sources]
        pairs = [pair for index in indexes for pair in index.attributes.get(size.attr, ())]
        origins += [binding.value for _, binding in pairs]
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Mult)
        and "node" in ast.unparse(part)
        for part in origins
    )


def _about_sampler(program: Program, call: ast.Call) -> str:
    """A sampler that numbers the ranks in another way than the group does."""
    rank = argument(call, 2, "rank")
    count = argument(call, 1, "num_replicas")
    if isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 1:
        return f"num_replicas is {count.value}, however many ranks there are"
    if _is_local_of_all(program, rank, count):
        return "the local rank is given as the rank: ranks of other hosts get the same samples"
    return ""


def _is_local_of_all(program: Program, rank: ast.expr | None, count: ast.expr | None) -> bool:
    """A rank among those of a host, beside the number of all; on a single host it is right."""
    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    origins = written_values(program, rank)
    is_variable = bool(origins) and not any(isinstance(origin, ast.Name) for origin in origins)
    return kinds == {"local"} and is_variable and _counts_all(program, count)


def _counts_all(program: Program, count: ast.expr | None) -> bool:
    origins = written_values(program, count)
    return any(
        "WORLD_SIZE" in (text := ast.unparse(origin)) or "get_world_size" in text
        for origin in origins
    )


def _is_before(program: Program, init: ast.Call, node: ast.AST) -> bool:
    if any(conditions(program, init)) or any(conditions(program, node)):
        return False
    is_same_function = enclosing_function(init) is enclosing_function(node)
    return is_same_function and position(init) < position(node)
