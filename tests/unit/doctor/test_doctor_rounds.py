"""Rounds: every pair exactly once, nobody twice in a round, and no round more than needed."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from drumline.doctor.pairs.rounds import rounds, rounds_of


@given(st.integers(min_value=0, max_value=65))
def test_every_pair_meets_once_and_each_host_is_in_one_pair_a_round(count: int) -> None:
    planned = rounds(count)
    met = Counter(pair for pairs in planned for pair in pairs)
    assert met == Counter(combinations(range(count), 2))
    for pairs in planned:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    if count > 1:
        assert len(planned) == count - 1 + count % 2


@given(st.integers(2, 20), st.data())
def test_of_some_pairs_only_those_are_left_in_rounds_that_have_any(count: int, data: st.DataObject) -> None:
    every = list(combinations(range(count), 2))
    wanted = data.draw(st.lists(st.sampled_from(every), unique=True))
    # The way back is the same pair.
    planned = rounds_of(count, [pair[::-1] for pair in wanted])
    assert sorted(pair for pairs in planned for pair in pairs) == sorted(wanted)
    assert all(planned)
