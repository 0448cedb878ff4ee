"""The tree in which shards are added does not depend on which rank has which shard."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drumline.data.sharding import shards_of_rank
from drumline.parallel.shard_sum import ShardSum, TreeNode, fold, nodes_of


class Sum:
    """A sum that remembers how it was made."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add(self, right: Sum) -> None:
        self.text = f"({self.text}+{right.text})"


def tree(num_shards: int, world_size: int) -> list[str]:
    """How the total is made when so many ranks add what they have, and then all of it is put
    together."""
    total: list[tuple[TreeNode, Sum]] = []
    for rank in range(world_size):
        sums: list[tuple[TreeNode, Sum]] = []
        for shard in shards_of_rank(rank, num_shards=num_shards, world_size=world_size):
            fold(sums, (TreeNode(shard, shard + 1), Sum(str(shard))), num_shards, Sum.add)
        for part in sums:
            fold(total, part, num_shards, Sum.add)
    return [part.text for _, part in total]


@given(st.integers(1, 40), st.integers(1, 45))
def test_the_order_of_a_sum_does_not_depend_on_the_ranks(num_shards: int, world_size: int) -> None:
    assert tree(num_shards, world_size) == tree(num_shards, 1)
    assert len(tree(num_shards, 1)) == 1


def test_neighbours_are_added_first() -> None:
    assert tree(1, 1) == ["0"]
    assert tree(3, 1) == ["((0+1)+2)"]
    assert tree(8, 3) == ["(((0+1)+(2+3))+((4+5)+(6+7)))"]
    assert tree(7, 2) == ["(((0+1)+(2+3))+((4+5)+6))"]


def test_a_rank_sends_one_part_where_ranks_divide_the_shards() -> None:
    for world_size in (1, 2, 4, 8):
        for rank in range(world_size):
            shards = shards_of_rank(rank, num_shards=8, world_size=world_size)
            assert nodes_of(shards, 8) == [TreeNode(shards.start, shards.stop)]
    assert nodes_of(range(3, 6), 8) == [TreeNode(3, 4), TreeNode(4, 6)]


def sum_of_shards(gradients: list[torch.Tensor]) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros(3))
    total = ShardSum(
        {"weight": parameter},
        rank=0,
        world_size=1,
        shards_by_rank=lambda num_shards: [range(num_shards)],
        bucket_bytes=1,
    )
    for _ in range(2):  # memory is used again in the next step
        for shard, gradient in enumerate(gradients):
            total.open_shard()
            (parameter * gradient).sum().backward()
            total.close_shard(shard, len(gradients))
        total.finish(len(gradients))
    assert parameter.grad is not None
    return parameter.grad


def test_gradients_are_added_in_the_order_of_the_tree() -> None:
    big = torch.full((3,), 1e8)
    small = torch.ones(3)
    # One after another each 1 would be lost in the 1e8; (1e8 + 1) + (1 + ...) differs from them in
    # the last place.
    shards = [big, small * 3, small * 3, small * 3, -big]
    expected = ((shards[0] + shards[1]) + (shards[2] + shards[3])) + shards[4]
    assert torch.equal(sum_of_shards(shards), expected)
    one_by_one = (((shards[0] + shards[1]) + shards[2]) + shards[3]) + shards[4]
    assert not torch.equal(expected, one_by_one)
