"""How many samples each rank gets by its speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.data.sharding import Sharding
from drumline.training.between_steps.balance import choose_sizes, even_sizes, speed_up


def test_sizes_are_proportional_to_speeds() -> None:
    assert choose_sizes((32, 32), [1.0, 2.0], smallest=1, most=(64, 64)) == (43, 21)
    assert choose_sizes((43, 21), [1.0, 1.0], smallest=1, most=(64, 64)) == (43, 21)
    assert choose_sizes((8, 8, 8, 8), [1.0, 1.0, 1.0, 3.0], smallest=2, most=(32,) * 4) == (
        10,
        10,
        9,
        3,
    )
    assert choose_sizes((8, 8), [1.0, 50.0], smallest=2, most=(16, 16)) == (14, 2)
    assert choose_sizes((32, 32), [1.0, 2.0], smallest=1, most=(36, 64)) == (36, 28), (
        "memory is the limit"
    )
    assert choose_sizes((8, 8, 8), [1.0, 90.0, 90.0], smallest=4, most=(24,) * 3) == (16, 4, 4)


def test_how_much_faster_steps_become() -> None:
    assert speed_up((32, 32), (43, 21), [1.0, 2.0]) == pytest.approx(2 / (43 / 32) - 1)
    assert speed_up((32, 32), (32, 32), [1.0, 2.0]) == 0
    assert speed_up((32, 32), (32, 32), [0.0, 2.0]) == 0, "not measured"


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.001, 10.0)), min_size=1, max_size=9),
    st.data(),
)
def test_the_global_batch_stays_the_same(
    ranks: list[tuple[int, float]], data: st.DataObject
) -> None:
    sizes, seconds = ([entry[place] for entry in ranks] for place in (0, 1))
    smallest = data.draw(st.integers(1, max(1, sum(sizes) // len(sizes))))
    most = [size + data.draw(st.integers(0, 100)) for size in sizes]
    chosen = choose_sizes(sizes, seconds, smallest=smallest, most=most)
    assert sum(chosen) == sum(sizes)
    assert all(
        min(smallest, limit) <= size <= limit for size, limit in zip(chosen, most, strict=True)
    )


def test_equal_sizes_are_those_of_the_plan() -> None:
    assert even_sizes(Sharding(batch_size=11, rank=0, world_size=3)) == (4, 4, 3)
