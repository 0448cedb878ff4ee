"""The order in which sums over shards are made: a binary tree, the same whoever has which shard. Pure arithmetic.

Neighbours are added, then pairs of neighbours, and so on. Whoever holds neighbouring shards adds up what lies under one
node of the tree, and hands on what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

Part = TypeVar("Part")


class Node(NamedTuple):
    """A node of the tree: the sum over shards [low, high)."""

    low: int
    high: int


def are_siblings(left: Node, right: Node, num_shards: int) -> bool:
    """Whether the tree adds these two neighbours next. A node covers a power of two of shards, except at the end."""
    size = left.high - left.low
    return (
        size & (size - 1) == 0
        and left.low % (2 * size) == 0
        and right.high == min(left.low + 2 * size, num_shards)
    )


def fold(
    sums: list[tuple[Node, Part]], new: tuple[Node, Part], num_shards: int, add: Callable[[Part, Part], None]
) -> None:
    """Append the next shard's part to a list of sums, and add up whatever now makes a whole node."""
    sums.append(new)
    while len(sums) > 1 and are_siblings(sums[-2][0], sums[-1][0], num_shards):
        (right_node, right), (left_node, left) = sums.pop(), sums.pop()
        add(left, right)
        sums.append((Node(left_node.low, right_node.high), left))


def nodes_of(shards: range, num_shards: int) -> list[Node]:
    """What a rank with these neighbouring shards is left with when it has added up all it can."""
    sums: list[tuple[Node, None]] = []
    for shard in shards:
        fold(sums, (Node(shard, shard + 1), None), num_shards, lambda left, right: None)
    return [node for node, _ in sums]
