"""The search for the largest size, and what is printed of it."""

from __future__ import annotations

import pytest
import torch

from drumline.cli.find_rank import batch_table, describe_batch
from drumline.tools.find.batch_search import (
    PRECISION,
    BatchSearch,
    Trial,
    is_out_of_memory,
    largest,
)


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 64, 100, 1000])
@pytest.mark.parametrize("smallest", [1, 2])
def test_the_largest_size_that_fits_is_found(limit: int, smallest: int) -> None:
    smallest = min(smallest, limit)
    for capacity in {0, 1, 2, 3, 5, 16, 33, 63, 99, 700, limit - 1, limit, limit + 1}:
        tried: list[int] = []

        def fits(size: int, tried: list[int] = tried, capacity: int = capacity) -> bool:
            tried.append(size)
            return size <= capacity

        result = largest(fits, smallest, limit)
        if capacity < smallest:
            assert (result, tried) == (0, [smallest])
            continue
        best = min(capacity, limit)
        assert best - max(1, best // PRECISION) < result <= best
        assert result in tried
        assert len(tried) == len(set(tried)) <= 16
        assert max(tried) <= limit


def test_errors_that_are_no_lack_of_memory_are_not_taken_for_it() -> None:
    assert is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    )
    assert is_out_of_memory(
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear")
    )
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    )
    assert not is_out_of_memory(
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")
    )


TRIALS = [
    Trial(1, True, 100.0, 1 << 30),
    Trial(2, True, 180.0, 2 << 30),
    Trial(4, False, 0.0, 3 << 30),
]
TRIALS += [Trial(3, True, 120.0, 3 << 30)]


def test_the_largest_is_chosen_and_a_faster_one_is_named() -> None:
    search = BatchSearch(TRIALS, limit=8, batch_size=16, measures_memory=True)
    assert (search.chosen.size, search.fastest.size) == (3, 2)
    assert list(batch_table(search)) == [
        "micro-batch   samples/s  memory",
        "          1         100  1 GiB",
        "          2         180  2 GiB",
        "          3         120  3 GiB",
        "          4           -  out of memory",
    ]
    assert list(describe_batch(search, 0.05, 2)) == [
        "--train.micro_batch_size 3: the largest that fits with 5% of the memory free; the global batch stays 16: "
        "3 micro-batches a step on each of 2 ranks",
        "2 is faster: 180 samples/s",
    ]


def test_all_of_a_step_may_fit() -> None:
    search = BatchSearch(TRIALS[:2], limit=2, batch_size=2, measures_memory=True)
    assert list(describe_batch(search, 0.05, 1)) == [
        "--train.micro_batch_size 2: all of a step fits; the global batch stays 2: 1 micro-batch a step on 1 rank"
    ]


def test_on_the_cpu_the_fastest_is_chosen_and_the_limits_are_named() -> None:
    search = BatchSearch(TRIALS, limit=8, batch_size=8, measures_memory=False)
    assert search.chosen.size == 2
    assert list(batch_table(search))[1:3] == ["          1         100", "          2         180"]
    assert list(describe_batch(search, 0.05, 1)) == [
        "--train.micro_batch_size 2: the fastest; the global batch stays 8: 4 micro-batches a step on 1 rank",
        "on the CPU only speed is measured, not what fits: a process that needs too much memory is killed by the "
        "kernel, it gets no error",
    ]
