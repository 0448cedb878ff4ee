"""Which replicas are the majority when they differ, and the message."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.watch.replica_differences import find_difference


def holdings(*hashes: tuple[int, ...], kinds: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """Ranks on hosts of their own that hold tensors t0, t1, ... with these hashes."""
    return [
        {
            "host": f"node-{rank}",
            "tensors": {
                f"t{number}": [(kinds or {}).get(rank, "float32 [3]"), value]
                for number, value in enumerate(values)
            },
        }
        for rank, values in enumerate(hashes)
    ]


@pytest.mark.parametrize(
    ("hashes", "last_agreed", "sentence"),
    [
        (
            [(1, 2), (1, 9), (1, 2)],
            5,
            "rank 1 (node-1) differs from the other 2 ranks in t1; all agreed at step 5",
        ),
        (
            [(8, 9, 7, 1), (1, 2, 3, 1), (1, 2, 3, 1), (1, 2, 3, 1)],
            None,
            "rank 0 (node-0) differs from the other 3 ranks in t0 and 2 more tensors; this was the first comparison",
        ),
        (
            [(1, 2), (1, 2), (1, 3), (4, 2)],
            5,
            "ranks 2, 3 (node-2 and node-3) differ from the other 2 ranks in t0 and 1 more tensor; all agreed "
            "at step 5",
        ),
        (
            [(1,), (2,)],
            0,
            "rank 0 (node-0) and rank 1 (node-1) differ in t0, and no majority shows which is right; all agreed at "
            "step 0",
        ),
        (
            [(1,), (2,), (2,), (1,)],
            5,
            "ranks 0, 3 (node-0 and node-3) and ranks 1, 2 (node-1 and node-2) differ in t0, and no majority shows "
            "which is right; all agreed at step 5",
        ),
    ],
)
def test_the_sentence(
    hashes: list[tuple[int, ...]], last_agreed: int | None, sentence: str
) -> None:
    found = find_difference(holdings(*hashes)).sentence(7, last_agreed)
    assert found == f"the replicas differ at step 7: {sentence}"


def test_many_ranks_are_not_all_named() -> None:
    sentence = find_difference(holdings(*[(rank < 12,) for rank in range(30)])).sentence(7, 1)
    hosts = "node-0, node-1, node-10, node-11 and 8 more"
    assert f"ranks 0-11 ({hosts}) differ from the other 18 ranks" in sentence


@pytest.mark.parametrize(
    ("hashes", "source", "suspects"),
    [
        ([(9,), (1,), (1,)], 1, [0]),
        ([(1,), (1,), (9,)], 0, [2]),
        ([(1,), (2,)], 0, [0, 1]),
        ([(1,), (2,), (3,)], 0, [0, 1, 2]),
        ([(7,), (1,), (1,), (2,), (2,)], 1, [0, 1, 2, 3, 4]),
        ([(1, 1), (9, 1), (1, 9), (1, 1)], 0, [1, 2]),
    ],
)
def test_the_minority_is_suspected(
    hashes: list[tuple[int, ...]], source: int, suspects: list[int]
) -> None:
    difference = find_difference(holdings(*hashes))
    assert difference.source == source
    assert difference.suspects == suspects
    assert difference.same_kinds


def test_tensors_of_another_kind_or_missing_ones_are_distinguished_from_different_values() -> None:
    assert not find_difference(holdings((1, 2), (1, 2), kinds={1: "float16 [3]"})).same_kinds
    missing = find_difference(holdings((1, 2), (1,), (1, 2)))
    assert not missing.same_kinds
    assert missing.tensors == ["t1"]
    extra = find_difference(holdings((1,), (1, 2), (1,)))
    assert extra.tensors == ["t1"]
    assert extra.suspects == [1]
