"""Hosts whose gloo or NCCL would take a network that leads nowhere: a container's bridge, or the loopback."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from drumline.doctor.finding import Finding
from drumline.doctor.pairs.survey import Edge, HostSeen, Survey
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.text import join_names


def interface_findings(survey: Survey) -> Iterator[Finding]:
    for number, host in enumerate(survey.hosts):
        if not host.is_here or len(survey.here()) < 2:
            continue
        edges = [edge for source in survey.here() if (edge := survey.edges.get((source, number))) is not None]
        yield from _of(host, edges, "gloo", GLOO_VARIABLE, host.gloo)
        # Without a GPU nobody calls NCCL.
        if host.facts is not None and host.facts.get("gpus"):
            yield from _of(host, edges, "NCCL", NCCL_VARIABLE, host.nccl)


def _of(
    host: HostSeen, edges: list[Edge], library: str, variable: str, chosen: dict[str, Any] | None
) -> Iterator[Finding]:
    good = _working(host, edges)
    if good is None:
        return  # nothing works; what is closed is told as such
    name = host.interface_of(good)
    fix = f"export {variable}={name} on {host.name}"
    if chosen is None:
        named, names = (
            host.variables.get(variable),
            [one["name"] for one in host.interfaces if one["address"]],
        )
        what = f"{variable}={named} names no interface with an address; it has {join_names(names)}"
        if named:
            yield Finding(level="problem", check="interface", where=host.name, what=what, fix=fix)
    elif chosen["address"] != good and not _is_reached(str(chosen["address"]), edges):
        why = f", as {variable}={host.variables[variable]} says" if variable in host.variables else ""
        what = (
            f"{library} takes {chosen['name']} ({chosen['address']}){why}, which no other host reaches; "
            f"{name} ({good}) works"
        )
        yield Finding(level="problem", check="interface", where=host.name, what=what, fix=fix)


def _working(host: HostSeen, edges: list[Edge]) -> str | None:
    """An address of the host that others reach."""
    if any(edge.data == "open" for edge in edges):
        return host.address
    reached = (address for edge in edges for address, how in (edge.others or {}).items() if how == "open")
    return next(reached, None)


def _is_reached(address: str, edges: list[Edge]) -> bool:
    """Or at least nobody has seen that it is not; the loopback never is."""
    seen = [edge.others[address] for edge in edges if edge.others and address in edge.others]
    return "open" in seen or not (seen or ipaddress.ip_address(address).is_loopback)
