"""Who is measured against whom, and when: a round-robin tournament.

Two transfers at once on one host would halve each other. So all pairs meet in rounds, and in a round each host is in
one pair at most: n hosts take n - 1 rounds (n when n is odd and one sits out), which is the fewest possible.
"""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[int, int]


def rounds(count: int) -> list[list[Pair]]:
    """Every pair of `range(count)` exactly once, the smaller number first."""
    # The circle method: one stays, the others move on by one place each round, and those who face each other meet.
    seats: list[int | None] = list(range(count)) if count % 2 == 0 else [*range(count), None]
    planned = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        planned.append(
            [_ordered(one, other) for one, other in facing if one is not None and other is not None]
        )
        seats.insert(1, seats.pop())
    return planned


def rounds_of(count: int, wanted: Iterable[Pair]) -> list[list[Pair]]:
    """Those rounds, with the wanted pairs alone; a round without any is left out."""
    kept = {_ordered(*pair) for pair in wanted}
    thinned = ([pair for pair in planned if pair in kept] for planned in rounds(count))
    return [pairs for pairs in thinned if pairs]


def _ordered(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
