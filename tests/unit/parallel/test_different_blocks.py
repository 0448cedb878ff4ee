"""Which blocks the error names when ranks call different ones (`--dist.find_unused_parameters`)."""

from __future__ import annotations

import pytest

from drumline.parallel.block_use import BlockCall, BlockUse

ORDER = ("a", "b", "c", "d")


def call_of(position: int, block: str | None) -> BlockCall:
    expected = ORDER[position] if position < len(ORDER) else None
    return BlockCall(
        number=3, position=position, block=block, expected=expected, rank=1, host="birch"
    )


@pytest.mark.parametrize(
    ("call", "peer", "own_text", "peer_text"),
    [
        (call_of(1, "c"), call_of(1, "b"), "the block c", "the block b"),
        (call_of(3, None), call_of(3, "d"), "no other block", "the block d"),
        (call_of(1, "new"), call_of(1, "b"), "the block new", "the block b"),
        (call_of(4, "new"), call_of(4, None), "the block new", "no other block"),
        (call_of(1, "c"), call_of(2, "d"), "the block c", "the block b"),
        (call_of(2, "d"), call_of(1, "c"), "the block b", "the block c"),
    ],
)
def test_what_both_ranks_call_at_the_same_position_is_named(
    call: BlockCall, peer: BlockCall, own_text: str, peer_text: str
) -> None:
    use = BlockUse({}, mode="fsdp", finds_unused=True)
    error = use._different_blocks(call, peer).what.replace(" (parameters: none of its own)", "")
    assert error.startswith(
        f"the loss calls {own_text}, and rank 1 on birch calls {peer_text} in the same batch"
    )
