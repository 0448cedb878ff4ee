"""DL034: the rank among all is taken for the one on this host, or the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import OF_FUNCTION, OF_NAME, OF_VARIABLE
from drumline_lint.program.tree import Binding, inside, last_name, scope_node
from drumline_lint.program.value import Known, Library, Rank
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.hosts import is_size_of_one_host
from drumline_lint.running.node_numbers import counts_nodes
from drumline_lint.training.device_uses import is_for_this_host_only

RULE = Rule(
    id="DL034",
    name="rank-confusion",
    severity=Severity.ERROR,
    summary="RANK and LOCAL_RANK are confused",
    why=(
        "RANK counts over all hosts, LOCAL_RANK on each from 0. On one host they are the same. On two, a local rank "
        "taken for the global one is there twice: both hosts read the same part of the data, or wait for ranks that "
        "never come. A global rank taken for the local one asks for GPUs that the host does not have."
    ),
    fix='use int(os.environ["RANK"]) for the rank among all, int(os.environ["LOCAL_RANK"]) for the one on this host',
    bad="""\
import os
import torch.distributed as dist

local_rank = int(os.environ["RANK"])
dist.barrier()
""",
    good="""\
import os
import torch.distributed as dist

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
dist.barrier()
""",
)
SAID = {"global": "the rank among all hosts", "local": "the rank on its host"}
# What takes a global rank, and where; and what says how many there are.
TAKES = {INIT: (4, "rank", 3, "world_size"), DISTRIBUTED_SAMPLER: (2, "rank", 1, "num_replicas")}
DEEPEST = 5


def check(program: Program, source: Source) -> Iterator[Finding]:
    """What is assigned to a name or a variable that says which rank it is; and ranks that are given to calls."""
    index = program.index(source)
    for statement in (*index.every(ast.Assign), *index.every(ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target, value in (pair for one in targets for pair in _pairs(one, statement.value)):
            wanted = _kind_of_target(program, target)
            if wanted and not _may_be_called_so(program, target):
                yield from _compared(program, source, target, value, wanted)
    for keyword in index.every(ast.keyword):
        if keyword.arg in OF_NAME and keyword.arg != "rank":  # a function may call a local rank so
            yield from _compared(program, source, keyword, keyword.value, OF_NAME[keyword.arg])
    for call in program.calls(source, *TAKES):
        yield from _taken(program, source, call)


def _compared(
    program: Program, source: Source, node: ast.AST, value: ast.expr, wanted: str
) -> Iterator[Finding]:
    """Whether a value is of the other kind; where its name is right, it was reported where it got its value."""
    if wanted not in SAID or OF_NAME.get(last_name(value)) == wanted:
        return
    kind = _kind_of(program, value)
    if kind in SAID and kind != wanted and not (wanted == "local" and counts_nodes(program, node)):
        name = node.arg if isinstance(node, ast.keyword) else source.code(node)
        yield RULE.at(
            source, node, f"{name} is to be {SAID[wanted]}, and {source.code(value)} is {SAID[kind]}"
        )


def _taken(program: Program, source: Source, call: ast.Call) -> Iterator[Finding]:
    """A local rank where the one among all is wanted; `args.local_rank` is one by its name."""
    position, keyword, size_position, size_keyword = TAKES[program.name_of(call.func)]
    value, size = argument(call, position, keyword), argument(call, size_position, size_keyword)
    if value is None or OF_NAME.get(last_name(value)) == "global" or is_size_of_one_host(size):
        return
    by_name = isinstance(value, ast.Attribute) and program.values(value) == {Rank("local")}
    if by_name or _kind_of(program, value) == "local":
        yield RULE.at(
            source,
            value,
            f"{source.code(call.func)} is given {source.code(value)}, {SAID['local']}: every host has the same",
        )


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    elif value is not None:
        yield target, value


def _may_be_called_so(program: Program, target: ast.expr) -> bool:
    """`rank`, short for the one on this host: there is no `local_rank`, and what it is used for concerns no others."""
    if last_name(target) != "rank" or not is_for_this_host_only(program, target):
        return False
    around = scope_node(target)
    return not any(last_name(one) == "local_rank" for one in inside(around, ast.Name, ast.Attribute))


def _kind_of_target(program: Program, target: ast.expr) -> str:
    if isinstance(target, ast.Subscript) and Library("os.environ") in program.values(target.value):
        keys = [one.value for one in program.values(target.slice) if isinstance(one, Known)]
        return OF_VARIABLE.get(str(keys[0]), "") if keys else ""
    return OF_NAME.get(last_name(target).lower().strip("_"), "")


def _kind_of(program: Program, value: ast.expr | None) -> str:
    """Which rank it is, if it comes from the environment or from torch; a name alone proves nothing."""
    kinds = _kinds(program, value, 0)
    return kinds.pop() if len(kinds) == 1 else ""


def _kinds(program: Program, value: ast.expr | None, depth: int) -> set[str]:
    """All that it may be; empty text for what is not known, nothing for a constant: that stands for one process."""
    if value is None or depth > DEEPEST:
        return {""}
    if isinstance(value, ast.Constant):
        return set()
    if isinstance(value, ast.Call):
        return _kinds_of_call(program, value, depth)
    if isinstance(value, ast.Subscript) and Library("os.environ") in program.values(value.value):
        return {_kind_of_variable(program, value.slice)}
    given: list[ast.expr | None] = [None]
    if isinstance(value, ast.IfExp):
        given = [value.body, value.orelse]
    elif isinstance(value, ast.Name):
        given = [one for binding in program.bindings(value) for one in _given_by(program, binding)]
    elif isinstance(value, ast.Attribute):
        given = _given_to_attribute(program, value)
    return set().union(*(_kinds(program, one, depth + 1) for one in given))


def _kinds_of_call(program: Program, call: ast.Call, depth: int) -> set[str]:
    name = program.name_of(call.func)
    if name in OF_FUNCTION:
        return {OF_FUNCTION[name]}
    if name in ("os.environ.get", "os.getenv") and call.args:
        return {_kind_of_variable(program, call.args[0])}
    return _kinds(program, call.args[0] if name in ("int", "str") and call.args else None, depth + 1)


def _given_by(program: Program, binding: Binding) -> list[ast.expr | None]:
    """Of `rank, local_rank = ranks()`, that part of all that the function returns."""
    function = program.function_of(binding.value) if isinstance(binding.value, ast.Call) else None
    if function is None or len(binding.path) != 1 or binding.kind != "assign":
        return program.given_by(binding)
    returned = [one.value for one in inside(function, ast.Return)]
    is_fitting = [isinstance(one, ast.Tuple) and binding.path[0] < len(one.elts) for one in returned]
    return [
        one.elts[binding.path[0]] if fits else None for one, fits in zip(returned, is_fitting, strict=True)
    ]


def _kind_of_variable(program: Program, key: ast.expr) -> str:
    kinds = {OF_VARIABLE.get(str(one.value), "") for one in program.values(key) if isinstance(one, Known)}
    return kinds.pop() if len(kinds) == 1 else ""


def _given_to_attribute(program: Program, attribute: ast.Attribute) -> list[ast.expr | None]:
    """All that is assigned to it in its file, whatever the object is."""
    index = program.index(program.source_of(attribute))
    found = index.attributes.get(attribute.attr, ())
    return [one for _, binding in found for one in program.given_by(binding)] or [None]
