from __future__ import annotations

import pytest

from drumline.errors import UsageError
from drumline.launch.counts import NodeCounts, least_nodes, read_counts, wrong_counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("3", NodeCounts(None, 3)),
        ("2:3", NodeCounts(2, 3)),
        ("2:", NodeCounts(2, None)),
        ("3:3", NodeCounts(3, 3)),
        *((text, None) for text in ("", ":", "0", "0:3", "4:3", "a", "1:2:3", "-1", ":3")),
    ],
)
def test_what_a_user_may_write(text: str, counts: NodeCounts | None) -> None:
    assert read_counts(text) == counts
    assert (wrong_counts(text) is None) == (counts is not None)


def test_the_least_of_a_known_number() -> None:
    assert least_nodes(None, 3, known_from="x") is None
    assert least_nodes("3", 3, known_from="x") is None
    assert least_nodes("1:", 3, known_from="x") == 1
    assert least_nodes("2:3", 3, known_from="x") == 2
    for text in ("2:4", "2", "4:"):
        with pytest.raises(UsageError) as caught:
            least_nodes(text, 3, known_from="the list of hosts")
        assert caught.value.what == f"--nnodes is {text}, but there are 3 in the list of hosts"
        assert caught.value.next_step == "give `--nnodes MIN:`, with a MIN from 1 to 3"
