"""Edges that share a cause, gathered so that one sentence names the host or the edge, in place of one for each edge.

Two hosts have one line. With more, what holds for all ways into a host is that host's; what holds for all ways out of
it too; the rest is told by the host it leads to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from drumline.doctor.pairs.survey import Survey
from drumline.text import join_names

Way = tuple[int, int]


@dataclass(frozen=True)
class Gathered:
    """Bad ways with one cause."""

    host: int
    """Where to look: the one that they lead to, or all come from."""
    ways: tuple[Way, ...]
    where: str
    """`b`, `a -> b` or `a <-> b`."""
    phrase: str
    """`from every other host`, `from a and c`, `from here to every other host`, `both ways`."""


def gather(survey: Survey, bad: Collection[Way]) -> Iterator[Gathered]:
    """In the order of hosts."""
    here, names = survey.here(), [host.name for host in survey.hosts]
    if len(here) == 2 and len(bad) == 2:
        one, other = here
        yield Gathered(other, tuple(sorted(bad)), f"{names[one]} <-> {names[other]}", "both ways")
        return
    into, out = _by_end(bad, 1), _by_end(bad, 0)
    num_others = len(here) - 1
    whole = [number for number in into if len(into[number]) == num_others > 1]
    # Nothing comes in: then that nothing comes out is the same wall, and not told again.
    sources = [number for number in out if len(out[number]) == num_others > 1 and number not in whole]
    told = {way for number in whole for way in (*into[number], *_if_all(out, number, num_others))}
    for number in whole:
        yield Gathered(number, tuple(into[number]), names[number], "from every other host")
    for number in sources:
        ways = [way for way in out[number] if way not in told]
        told.update(ways)
        if len(ways) == 1:
            yield _single(ways, names)
        elif ways:
            yield Gathered(number, tuple(ways), names[number], "from here to every other host")
    for ways in _by_end([way for way in bad if way not in told], 1).values():
        yield _single(ways, names)


def _single(ways: Sequence[Way], names: Sequence[str]) -> Gathered:
    sources, target = join_names([names[source] for source, _ in ways]), ways[0][1]
    return Gathered(target, tuple(ways), f"{sources} -> {names[target]}", f"from {sources}")


def _by_end(ways: Collection[Way], end: int) -> dict[int, list[Way]]:
    ordered: dict[int, list[Way]] = defaultdict(list)
    for way in sorted(ways, key=lambda way: (way[end], way[1 - end])):
        ordered[way[end]].append(way)
    return dict(ordered)


def _if_all(out: dict[int, list[Way]], number: int, num_others: int) -> list[Way]:
    ways = out.get(number, [])
    return ways if len(ways) == num_others else []
