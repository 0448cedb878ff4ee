"""What comes of a call."""

from __future__ import annotations

import ast

from drumline_lint.program import ranks
from drumline_lint.program.classes import called_as, name_of_owner
from drumline_lint.program.functions import returned
from drumline_lint.program.names import SYNC_BATCH_NORM
from drumline_lint.program.partials import PARTIAL, given_before
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import (
    NOTHING,
    Class,
    Function,
    Instance,
    Known,
    Library,
    Made,
    Method,
    Rank,
    RankTest,
    Value,
    Values,
)
from drumline_lint.program.whole import Whole

# They give back what they were given, or something that stands for it.
PASSED_THROUGH = {
    "int",
    "list",
    "tuple",
    "bool",
    "iter",
    "copy.copy",
    "copy.deepcopy",
    "torch.compile",
    "torch.jit.script",
    SYNC_BATCH_NORM,
    "typing.cast",
}
PASSING_METHODS = {
    "bfloat16",
    "compile",
    "cpu",
    "cuda",
    "double",
    "eval",
    "float",
    "half",
    "requires_grad_",
    "share_memory",
    "to",
    "train",
}


def of_call(program: Whole, node: ast.Call) -> Values:
    """All that it may give."""
    found: set[Value] = set()
    callees = program.values(node.func)
    for callee in callees:
        found |= _called(program, callee, node)
    if not found and last_name(node.func):
        named = frozenset(callee for callee in callees if isinstance(callee, Rank | RankTest))
        return named or ranks.by_name(last_name(node.func))
    return frozenset(found)


def _called(program: Whole, callee: Value, node: ast.Call) -> Values:
    if isinstance(callee, Library):
        return _called_library(program, callee.name, node)
    if isinstance(callee, Method):
        if callee.name in PASSING_METHODS:
            return frozenset({callee.of})
        return frozenset({Made(f"{name_of_owner(program, callee.of)}.{callee.name}", node)})
    if isinstance(callee, Function):
        return returned(program, callee.node)
    if isinstance(callee, Class):
        return frozenset({Instance(callee.node)})
    if isinstance(callee, Instance):
        return frozenset({Made(f"{callee.of.name}.{called_as(program, callee.of)}", node)})
    if isinstance(callee, Made):
        return frozenset({Made(f"{callee.name}()", node)})
    return frozenset({callee}) if isinstance(callee, RankTest | Rank) else NOTHING


def _called_library(program: Whole, name: str, node: ast.Call) -> Values:
    if name in ranks.OF_FUNCTION:
        return frozenset({Rank("group" if node.args or node.keywords else ranks.OF_FUNCTION[name])})
    if name in ("os.getenv", "os.environ.get"):
        keys = program.values(node.args[0]) if node.args else NOTHING
        return frozenset().union(*(ranks.by_variable(key.value) for key in keys if isinstance(key, Known)))
    if name in PASSED_THROUGH and node.args:
        passed = program.values(node.args[-1] if name == "typing.cast" else node.args[0])
        return passed or frozenset({Made(name, node)})
    if name == PARTIAL and node.args and (functions := given_before(program, node)):
        return functions
    return frozenset({Made(name, node)})
