"""DL074: ranks start a group with numbers that do not fit together."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.hosts import settings
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, INIT
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function, last_name, nodes_in, position
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source

RULE = rule("DL074", in_tests=False)
_DRAWS = ("random.randint", "random.randrange", "random.choice", "numpy.random.randint")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Ports that every rank draws, ranks that are the same everywhere, variables that are set too
    late."""
    inits = list(program.calls(source, INIT))
    for call in inits:
        is_alone = program.values(argument(call, 3, "world_size")) == {ConstantValue(1)}
        address = None if is_alone else argument(call, 1, "init_method")
        message = _about_ports(program, call, address)
        message = message or _about_rank(program, call)
        if message:
            yield RULE.at(source, call, message)
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        if message := _about_sampler(program, call):
            yield RULE.at(source, call, message, fix="leave out num_replicas and rank")
    for setting in settings(program, source):
        if setting.name not in _ADDRESS or any(rank_tests_at(program, setting.node)):
            continue
        message = _about_ports(program, setting.node, setting.value)
        is_late = any(_is_before(program, init, setting.node) for init in inits)
        if not message and is_late and setting.name.startswith("MASTER"):
            message = f"{setting.name} is set after the group has been initialized"
        if message:
            yield RULE.at(source, setting.node, message)


def _about_ports(program: Program, node: ast.AST, value: ast.expr | None) -> str:
    """What is wrong with a port that a rank draws or looks for by itself."""
    names = nodes_in(value, ast.Name) if value is not None else []
    bindings = [binding for name in names for binding in program.bindings(name)]
    if any(binding.kind == "parameter" for binding in bindings):
        return ""  # whoever starts the ranks gives it to all
    calls = [part for part in parts(program, value) if isinstance(part, ast.Call)]
    draws = [
        call
        for call in calls
        if program.name_of(call.func) in _DRAWS or "free_port" in last_name(call.func).lower()
    ]
    if is_on_every_rank(program, node) and any(is_on_every_rank(program, call) for call in draws):
        return "every rank takes a port of its own, and they do not find each other"
    return ""


def _about_rank(program: Program, call: ast.Call) -> str:
    rank = argument(call, 4, "rank")
    world_size = written_values(program, argument(call, 3, "world_size"))
    sizes = [size.value for size in world_size if isinstance(size, ast.Constant)]
    is_several = any(isinstance(size, int) and size > 1 for size in sizes)
    if isinstance(rank, ast.Constant) and isinstance(rank.value, int) and is_several:
        return f"rank={rank.value} on every rank: the others never join"
    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    origins = written_values(program, rank)
    is_variable = bool(origins) and not any(isinstance(origin, ast.Name) for origin in origins)
    is_of_all = _counts_all(program, argument(call, 3, "world_size"))
    if kinds == {"local"} and is_variable and is_of_all:
        return "the local rank is given as the rank: on a second host it is there twice"
    return ""


def _about_sampler(program: Program, call: ast.Call) -> str:
    """A sampler that numbers the ranks in another way than the group does."""
    rank = argument(call, 2, "rank")
    count = argument(call, 1, "num_replicas")
    if isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 1:
        return f"num_replicas is {count.value}, however many ranks there are"
    kinds = {value.kind for value in program.values(rank) if isinstance(value, Rank)}
    origins = written_values(program, rank)
    is_variable = bool(origins) and not any(isinstance(origin, ast.Name) for origin in origins)
    if kinds == {"local"} and is_variable and _counts_all(program, count):
        return "the local rank is given as the rank: ranks of other hosts get the same samples"
    return ""


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
