"""A question that leads back to itself: it ends, and what was found on the way is not taken for the
whole."""

from __future__ import annotations

from drumline_lint.program.queries import QueryCache

RING = {"a": "b", "b": "c", "c": "a", "d": "b"}


def calls_reached(asked: QueryCache, name: str) -> frozenset[str]:
    """All that can be come to from a name."""
    return asked.once(
        name, lambda: frozenset({name}) | calls_reached(asked, RING[name]), frozenset()
    )


def test_everyone_in_a_ring_gets_the_whole_answer_whoever_is_asked_first() -> None:
    asked = QueryCache()
    assert [calls_reached(asked, name) for name in "abc"] == [frozenset("abc")] * 3
    assert calls_reached(asked, "d") == frozenset("abcd")


def test_an_answer_is_found_once() -> None:
    asked = QueryCache()
    looked = []
    for _ in range(2):
        asked.once("key", lambda: looked.append(1), None)
    assert len(looked) == 1


def test_a_question_that_leads_too_deep_is_given_up_and_asked_again() -> None:
    asked = QueryCache(deepest=5)

    def depth(number: int) -> int:
        return asked.once(number, lambda: 1 + depth(number + 1) if number < 8 else 1, 0)

    assert depth(0) == 6
    assert depth(4) == 5


def test_what_was_hard_to_find_is_kept_though_it_is_not_whole() -> None:
    asked = QueryCache(far=2)
    assert calls_reached(asked, "a") == frozenset("abc")
    assert calls_reached(asked, "b") == frozenset("bc")
