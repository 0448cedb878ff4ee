"""One thing compared across hosts: which share a value, and which have another one than most."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.text import join_names

MAX_VALUES = 4


@dataclass(frozen=True)
class Comparison:
    """One thing that was compared: each value with its hosts, the most common first."""

    name: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def differs(self) -> bool:
        return len(self.groups) > 1

    @property
    def usual(self) -> str:
        return self.groups[0][0]

    @property
    def odd_hosts(self) -> tuple[str, ...]:
        """Those with another value than most."""
        return tuple(host for _, hosts in self.groups[1:] for host in hosts)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": [{"value": value, "hosts": list(hosts)} for value, hosts in self.groups],
        }

    def text(self) -> str:
        """`2.13.0 on a and b; 2.11.0 on c`."""
        shown = [f"{value} on {join_names(hosts)}" for value, hosts in self.groups[:MAX_VALUES]]
        more = len(self.groups) - MAX_VALUES
        return "; ".join(shown) + (f"; and {more} more values" if more > 0 else "")

    def finding(self, level: Level, fix: str) -> Finding:
        what = f"{self.name} differs across hosts: {self.text()}"
        return Finding(level, "differences", join_names(self.odd_hosts), what, fix)


def compare(
    name: str, values: Mapping[str, Hashable], show: Callable[[Any], str] = str, *, unset: str = "none"
) -> Comparison:
    """Hosts grouped by value; of two values that are as common, the first host's comes first."""
    hosts: dict[Hashable, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    groups = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return Comparison(
        name, tuple((unset if value is None else show(value), tuple(who)) for value, who in groups)
    )
