"""Data that is split by rank by hand, such that ranks may get different numbers of samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.making import made_of
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_world_size
from drumline_lint.program.tree import class_around, function_around, inside, last_name
from drumline_lint.program.value import Rank

_DIVISIONS = (ast.FloorDiv, ast.Mod, ast.Div)


def uneven_split(program: Program, dataset: ast.expr | None) -> ast.expr | None:
    """The part of what a dataset is made of that gives one rank more than another; None: it is even, or not known."""
    for node in made_of(program, dataset):
        if isinstance(node, ast.expr):
            count = _counted_by(program, node)
            if count is not None and not _is_evened(program, node, count) and not _is_endless(node):
                return node
    return None


def _counted_by(program: Program, node: ast.expr) -> ast.expr | None:
    """The number of ranks in `x[rank::world_size]`, `range(rank, n, world_size)`, `number % world_size == rank`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return node.slice.step if _is_rank(program, node.slice.lower) else None
    if isinstance(node, ast.Call) and last_name(node.func) in ("range", "islice"):
        first, count = len(node.args) - 3, len(node.args) - 1
        return node.args[count] if first >= 0 and _is_rank(program, node.args[first]) else None
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        left, right = node.left, node.comparators[0]
        for one, other in ((left, right), (right, left)):
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) and _is_rank(program, other):
                return one.right
    return None


def _is_rank(program: Program, node: ast.expr | None) -> bool:
    return any(isinstance(value, Rank) for value in program.values(node))


def _is_evened(program: Program, split: ast.expr, count: ast.expr) -> bool:
    """Whether a length is divided by the number of ranks near it: to cut the rest off, to fill up, or to check."""
    as_written = ast.dump(count)
    for division in _near(program, split):
        is_by_count = ast.dump(division.right) == as_written or is_world_size(division.right)
        is_split_itself = any(one is division for one in ast.walk(split))
        if is_by_count and not is_split_itself and not _is_of_batch(division.left):
            return True
    return False


def _near(program: Program, split: ast.expr) -> Iterator[ast.BinOp]:
    """The divisions in its function, or class, or file."""
    function = function_around(split)
    owner = class_around(function) if function is not None else None
    home = owner or function or program.source_of(split).tree
    for one in inside(home, ast.BinOp, into_functions=owner is not None):
        if isinstance(one.op, _DIVISIONS):
            yield one


def _is_of_batch(length: ast.expr) -> bool:
    """`batch_size // world_size` says nothing of the number of samples."""
    names = [last_name(one).lower() for one in inside(length, ast.Name, ast.Attribute)]
    return isinstance(length, ast.Constant) or any("batch" in name for name in names)


def _is_endless(split: ast.expr) -> bool:
    """A stream that begins again and again never ends on one rank first."""
    function = function_around(split)
    loops = inside(function, ast.While) if function is not None else ()
    return any(isinstance(one.test, ast.Constant) and bool(one.test.value) for one in loops)
