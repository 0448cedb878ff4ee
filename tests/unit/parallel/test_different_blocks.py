"""Which block the error names when ranks call different ones (`--dist.find_unused_parameters`)."""

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
    ("call", "peer", "message"),
    [
        (call_of(1, "c"), call_of(1, "b"), "the loss does not call the block b"),
        (call_of(3, None), call_of(3, "d"), "the loss does not call the block d"),
        (call_of(1, "new"), call_of(1, "b"), "the loss calls the block new"),
        (call_of(4, "new"), call_of(4, None), "the loss calls the block new"),
        (call_of(1, "c"), call_of(1, "d"), "the loss calls the block c"),
        (call_of(1, "c"), call_of(2, "d"), "the loss does not call the block b"),
        (call_of(2, "d"), call_of(1, "c"), "the loss calls the block b"),
    ],
)
def test_the_first_block_that_only_one_of_them_calls_is_named(
    call: BlockCall, peer: BlockCall, message: str
) -> None:
    use = BlockUse({}, mode="fsdp", finds_unused=True)
    for name in ORDER:
        use._called.add(name)
    use.learn()
    error = str(use._different_blocks(call, peer))
    assert error.startswith(f"{message} (parameters: ")
    is_called = "does not call it" if "loss calls" in message else "calls it"
    assert f"rank 1 on birch {is_called} in the same batch" in error
