"""Which hosts share a value, and which are the odd ones out: what every comparison of hosts is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.text import join_names

MOST_GROUPS = 4


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, and each value with its hosts, the most common first."""

    name: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def differs(self) -> bool:
        return len(self.groups) > 1

    @property
    def usual(self) -> str:
        """The value that most hosts have; of two hosts, the first one's."""
        return self.groups[0][0]

    @property
    def odd(self) -> tuple[str, ...]:
        """The hosts that have another value than most."""
        return tuple(host for _, hosts in self.groups[1:] for host in hosts)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": [{"value": value, "hosts": list(hosts)} for value, hosts in self.groups],
        }

    def text(self) -> str:
        """`2.13.0 on a and b; 2.11.0 on c`."""
        shown = [f"{value} on {join_names(hosts)}" for value, hosts in self.groups[:MOST_GROUPS]]
        more = len(self.groups) - MOST_GROUPS
        return "; ".join(shown) + (f"; and {more} other values" if more > 0 else "")

    def finding(self, level: Level, fix: str) -> Finding:
        """The odd ones out, in a sentence."""
        what = f"not the same {self.name} on all hosts: {self.text()}"
        return Finding(level=level, check="differences", where=join_names(self.odd), what=what, fix=fix)


def row_of(
    name: str, values: Mapping[str, Hashable], show: Callable[[Any], str] = str, *, unset: str = "none"
) -> Row:
    """Hosts by their values; where two values are as common, the one that is named first wins."""
    hosts: dict[Hashable, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    groups = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return Row(name, tuple((unset if value is None else show(value), tuple(who)) for value, who in groups))
