"""Environment variables and addresses that code sets, and whether all processes are on one host."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected, with_imported
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.value import ConstantValue, Library
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import PYTHON, Launch
from drumline_lint.reading.rendezvous import most_nodes
from drumline_lint.reading.source import Source

ENVIRONMENT = Library("os.environ")
# Code without these words may be for one node, which has one local rank 0.
NODES = re.compile(r"n_?nodes|num_nodes|node_?rank|nodeid|multi[-_ ]?node", re.IGNORECASE)

# `python train.py` is one process, unless the program or the script starts others.
_STARTING_RANKS = re.compile(r"spawn|Process\(|start_processes|lightning|launch\(|subprocess")
_OF_RANKS = re.compile(r"rank|world_?-?size", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """A variable that is always set; not by `setdefault`, which keeps the launcher's value."""

    name: str
    value: ast.expr | None
    node: ast.AST


def settings(program: Program, source: Source) -> list[Setting]:
    """By an assignment, or `os.environ.update`."""
    return program.cached(("settings", source), lambda: list(_find_settings(program, source)))


def _find_settings(program: Program, source: Source) -> Iterator[Setting]:
    if "environ" not in source.text:
        return
    for statement in program.index(source).every(ast.Assign):
        for target in statement.targets:
            yield from _assigned(program, target, statement.value, statement)
    for call in program.index(source).calls.get("update", ()):
        if program.name_of(call.func) == "os.environ.update":
            yield from _updated(program, call)


def _assigned(
    program: Program, target: ast.expr, value: ast.expr | None, statement: ast.Assign
) -> Iterator[Setting]:
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = getattr(value, "elts", None) or [None] * len(target.elts)
        for inner, part in zip(target.elts, parts, strict=False):
            yield from _assigned(program, inner, part, statement)
    elif isinstance(target, ast.Subscript) and ENVIRONMENT in program.values(target.value):
        yield from _set(program, target.slice, value, statement)


def _updated(program: Program, call: ast.Call) -> Iterator[Setting]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield Setting(keyword.arg, keyword.value, keyword)
    for values in call.args:
        assigned = program.assigned(values) if isinstance(values, ast.Name) else []
        for mapping in (values, *assigned):
            if isinstance(mapping, ast.Dict):
                for key, value in zip(mapping.keys, mapping.values, strict=True):
                    if key is not None:
                        yield from _set(program, key, value, key)


def _set(
    program: Program, name: ast.expr, value: ast.expr | None, node: ast.AST
) -> Iterator[Setting]:
    for constant in program.values(name):
        if isinstance(constant, ConstantValue) and isinstance(constant.value, str):
            yield Setting(constant.value, value, node)


def speaks_of_nodes(program: Program, source: Source) -> bool:
    """Whether the files around it name several nodes, and no script starts it on one only."""
    near = connected(program, source)
    launches = [launch for file in near for launch in program.launches_of(file)]
    if launches and all(most_nodes(launch) == 1 for launch in launches):
        return False
    return _name_nodes(program, near) or any((most_nodes(launch) or 1) > 1 for launch in launches)


@cached_query
def _name_nodes(program: Program, sources: frozenset[Source]) -> bool:
    return any(NODES.search(file.text) for file in sources)


@cached_query
def is_started_alone(program: Program, source: Source) -> bool:
    """Whether scripts start the programs that a file belongs to, and always as one process."""
    near = connected(program, source)
    mains = [main for main in near if program.launches_of(main)]
    started = [
        launch
        for main in mains
        if source in with_imported(program, [main])
        for launch in program.launches_of(main)
    ]
    starts_ranks = any(_STARTING_RANKS.search(file.text) for file in near)
    return bool(started) and all(_is_one_process(launch, starts_ranks) for launch in started)


def _is_one_process(launch: Launch, starts_ranks: bool) -> bool:
    if launch.srun is not None or launch.mpirun or launch.script.container is not None:
        return False
    if launch.kind == PYTHON:
        command = launch.command
        is_repeated = command.is_background or bool(command.loop)
        return not starts_ranks and not is_repeated and not _OF_RANKS.search(launch.script.text)
    return processes_per_node(launch) == 1 and most_nodes(launch) == 1


LOOPBACK = ("localhost", "127.", "::1", "[::1]")
DEEPEST = 5


def written_text(program: Program, expression: ast.expr | None, depth: int = 0) -> str | None:
    """The text that an expression is, or begins with, if it is a constant with no alternative."""
    if isinstance(expression, ast.Constant):
        return str(expression.value) if isinstance(expression.value, (str, int)) else None
    if isinstance(expression, ast.JoinedStr):
        first = expression.values[0] if expression.values else None
        return (
            first.value
            if isinstance(first, ast.Constant) and isinstance(first.value, str)
            else None
        )
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        return written_text(program, expression.left, depth + 1) if depth < DEEPEST else None
    if (
        isinstance(expression, ast.Call)
        and expression.args
        and program.name_of(expression.func) == "str"
    ):
        return written_text(program, expression.args[0], depth + 1)
    if isinstance(expression, ast.Name) and depth < DEEPEST:
        origins = [
            part
            for binding in program.bindings(expression)
            for part in program.expressions_of(binding)
        ]
        texts = [written_text(program, origin, depth + 1) for origin in origins]
        return texts[0] if texts and None not in texts else None
    return None


def is_loopback(host: str) -> bool:
    return host.lower().startswith(LOOPBACK)


def meets_on_one_host(program: Program, source: Source) -> bool:
    """Whether every group that a file makes is on one host: by its address, or by its world
    size."""
    inits = list(program.calls(source, INIT))
    return bool(inits) and all(_is_met_on_one_host(program, init) for init in inits)


def _is_met_on_one_host(program: Program, init: ast.Call) -> bool:
    address = written_text(program, argument(init, 1, "init_method")) or ""
    if address.startswith("tcp://") and is_loopback(address.removeprefix("tcp://")):
        return True
    return "device_count" in ast.unparse(argument(init, 3, "world_size") or ast.Constant(None))
