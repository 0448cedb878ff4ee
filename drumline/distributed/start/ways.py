"""The ways between hosts on which data will go: which are closed, whether that matters, and in which words it is told.

The meeting point is one port on one host, and open. Data takes other ports, on the network that the backend chose,
from host to host: where that is closed, the group waits in silence. Nothing is measured here; `reach` does that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drumline.errors import PreflightError, as_list
from drumline.net.dial import ProbeTarget
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.net.reasons import explained_closed
from drumline.text import join_names

VARIABLES = {"gloo": GLOO_VARIABLE, "nccl": NCCL_VARIABLE}
MOST_LINES = 8
CLOCK_WARNING_S = 1.0


@dataclass(frozen=True)
class ClosedWay:
    """One host could not get through to another."""

    caller: ProbeTarget
    door: ProbeTarget
    cause: str

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(self.door.address).is_loopback


@dataclass(frozen=True)
class Judged:
    """What is wrong in words, and what mends it."""

    errors: Sequence[str]
    warnings: Sequence[str]
    fixes: Sequence[str]

    def raise_errors(self) -> None:
        if not self.errors:
            return
        lines = [*self.errors[:MOST_LINES]]
        if len(self.errors) > MOST_LINES:
            lines.append(f"and {len(self.errors) - MOST_LINES} more of this kind")
        what = lines[0] if len(lines) == 1 else as_list("data cannot go between these hosts:", lines)
        raise PreflightError(what, next_step="; ".join(self.fixes))


def judge(closed: Sequence[ClosedWay], wanted: Mapping[int, str | None], *, backend: str) -> Judged:
    """`wanted`: the network of each host (by rank) that leads to the others, as far as it is known."""
    needed = [way for way in closed if is_needed(way.caller, way.door, backend)]
    spare = [way for way in closed if way not in needed]
    warnings = [
        f"{line}. {backend} does without this way, as the addresses are now" for line in _lines(spare, wanted)
    ]
    return Judged(_lines(needed, wanted), warnings, _fixes(needed, wanted, backend))


def is_needed(caller: ProbeTarget, door: ProbeTarget, backend: str) -> bool:
    """gloo has the host with the larger address call the other one, and never the other way round."""
    if backend != "gloo":
        return True
    mine, theirs = ipaddress.ip_address(caller.address), ipaddress.ip_address(door.address)
    return mine.version != theirs.version or int(mine) >= int(theirs)


def _lines(ways: Sequence[ClosedWay], wanted: Mapping[int, str | None]) -> list[str]:
    """One for each host that cannot be reached in one way, with all who tried."""
    groups: dict[tuple[int, str], list[ClosedWay]] = {}
    for way in ways:
        groups.setdefault((way.door.rank, way.cause), []).append(way)
    return [_line([way.caller.host for way in group], group[0], wanted) for group in groups.values()]


def _line(callers: Sequence[str], way: ClosedWay, wanted: Mapping[int, str | None]) -> str:
    door, who = way.door, join_names(callers)
    place = f"{door.address} ({door.interface})"
    if way.is_local:
        return f"{door.host} takes data on its loopback, {place}, where {who} cannot reach it"
    if _is_wrong(door, wanted):
        better = wanted[door.rank]
        return (
            f"{door.host} takes data on the wrong network, {place}, where {who} cannot reach it: "
            f"port {door.port}: {explained_closed(way.cause)}; {better} is the one that leads to the other hosts"
        )
    return f"{who} cannot reach {door.host}'s data port {door.port} at {place}: {explained_closed(way.cause)}"


def _is_wrong(door: ProbeTarget, wanted: Mapping[int, str | None]) -> bool:
    return wanted.get(door.rank) not in (None, door.interface)


def _fixes(ways: Sequence[ClosedWay], wanted: Mapping[int, str | None], backend: str) -> list[str]:
    fixes: dict[str, list[str]] = {}
    for way in ways:
        if way.is_local or _is_wrong(way.door, wanted):
            name = wanted.get(way.door.rank) or "NAME_OF_THE_NETWORK"
            fix = f"export {VARIABLES.get(backend, GLOO_VARIABLE)}={name} on"
        else:
            fix = "open all TCP ports between the nodes (in AWS: all traffic from the security group itself), on"
        hosts = fixes.setdefault(fix, [])
        if way.door.host not in hosts:
            hosts.append(way.door.host)
    return [f"{fix} {join_names(hosts)}" for fix, hosts in fixes.items()]


def clocks_apart(hosts: Mapping[int, str], ahead: Mapping[int, float]) -> Iterator[str]:
    """The warning, if any. `ahead`: by how many seconds each host's wall clock is ahead of that of rank 0's host."""
    off = [
        f"{hosts[rank]} is {abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} {hosts[0]}"
        for rank, seconds in sorted(ahead.items())
        if abs(seconds) >= CLOCK_WARNING_S
    ]
    if off:
        yield (
            f"wall clocks differ: {join_names(off)}. Drumline does not depend on them, but times in logs do, and plain "
            "torchrun loses nodes whose clocks differ by more than some seconds. Next: synchronize them by NTP "
            "(sudo chronyc makestep)"
        )
