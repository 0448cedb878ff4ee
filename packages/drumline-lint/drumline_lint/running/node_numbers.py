"""What is called a local rank and serves as the number of a node: `rank = local_rank * gpus_per_node + gpu`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.imports import imported_sources
from drumline_lint.program.program import Program
from drumline_lint.program.tree import inside, last_name
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source


def counts_nodes(program: Program, named: ast.AST) -> bool:
    """Whether a rank on one host is added to multiples of it, in its file or in one that this imports."""
    if not isinstance(named, ast.Name | ast.Attribute):
        return False
    name = last_name(named)
    own = program.source_of(named)
    return any(
        _is_multiple(node.left if is_left else node.right, name)
        and _is_rank_on_host(program, node.right if is_left else node.left)
        for source in (own, *imported_sources(program, own))
        if name in source.text
        for node in _sums(program, source)
        for is_left in (True, False)
    )


def _sums(program: Program, source: Source) -> Iterator[ast.BinOp]:
    return (one for one in program.index(source).every(ast.BinOp) if isinstance(one.op, ast.Add))


def _is_multiple(node: ast.expr, name: str) -> bool:
    """`name * x`, or `x * name`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return any(last_name(one) == name for one in inside(node, ast.Name, ast.Attribute))


def _is_rank_on_host(program: Program, node: ast.expr) -> bool:
    kinds = {one.kind for one in program.values(node) if isinstance(one, Rank)}
    return not kinds.isdisjoint(("local", "spawned"))
