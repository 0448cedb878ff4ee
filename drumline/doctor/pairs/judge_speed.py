"""Lines that are far slower than the others: of one host, or between two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

from drumline.doctor.finding import Finding
from drumline.doctor.pairs.gathered import Way
from drumline.doctor.pairs.survey import Survey
from drumline.text import bit_rate

# A line at a tenth of the others' speed (1 Gbit/s negotiated in place of 10) must be found; a neighbour on a shared
# line takes a half, seldom two thirds. A measurement is repeated before it counts.
SLOW_SHARE = 0.25


def speed_findings(survey: Survey) -> Iterator[Finding]:
    for way, edge in survey.edges.items():
        if edge.error is not None and edge.bytes_per_s is None:
            what = f"it opened, but could not be measured: {edge.error}"
            fix = "run the doctor again; a line that drops in the middle is a fault of its own"
            yield Finding(level="problem", check="bandwidth", where=_named(survey, way), what=what, fix=fix)
    speeds = {way: edge.bytes_per_s for way, edge in survey.edges.items() if edge.bytes_per_s}
    if speeds:
        yield from _slow(survey, speeds, usual_speed(speeds.values()))


def usual_speed(speeds: Iterable[float]) -> float:
    """What a line here carries when nothing is wrong with it: the upper quartile.

    Not the median: one slow host of three is on four ways out of six."""
    ordered = sorted(speeds)
    return ordered[math.ceil(0.75 * (len(ordered) - 1))]


def _slow(survey: Survey, speeds: Mapping[Way, float], usual: float) -> Iterator[Finding]:
    """Hosts all of whose ways are slow, in or out or both; then the edges that no such host explains."""
    slow = {way for way, speed in speeds.items() if speed < SLOW_SHARE * usual}
    left = set(slow)
    into, out = _by_end(speeds, 1), _by_end(speeds, 0)
    for number in survey.here():
        sides = [side for side in (into.get(number), out.get(number)) if side and side <= slow]
        ways = {way for side in sides for way in side}
        # One way alone may be slow by its other end; ways to hosts that are slow themselves say nothing of this one.
        if max(map(len, sides), default=0) < 2 or not ways & left:
            continue
        direction = "to and from it" if len(sides) == 2 else "to it" if into[number] in sides else "from it"
        left -= ways
        rate = statistics.median_high([speeds[way] for way in ways])
        what = f"all ways {direction} carry {bit_rate(rate)}; others carry {bit_rate(usual)}"
        name = survey.hosts[number].name
        yield Finding(level="problem", check="bandwidth", where=name, what=what, fix=_fix(survey, number))
    for way in sorted(left):
        what = f"it carries {bit_rate(speeds[way])}; others carry {bit_rate(usual)}"
        yield Finding(
            level="problem", check="bandwidth", where=_named(survey, way), what=what, fix=_fix(survey, way[0])
        )


def _by_end(speeds: Mapping[Way, float], end: int) -> dict[int, set[Way]]:
    ways: dict[int, set[Way]] = {}
    for way in speeds:
        ways.setdefault(way[end], set()).add(way)
    return ways


def _fix(survey: Survey, number: int) -> str:
    host = survey.hosts[number]
    device = host.interface_of(host.address) or "eth0"
    return (
        f"ethtool {device}; tc qdisc show dev {device} on {host.name}: link speed and limits (in a cloud: the "
        "network that the instance's size has)"
    )


def _named(survey: Survey, way: Way) -> str:
    return f"{survey.hosts[way[0]].name} -> {survey.hosts[way[1]].name}"
