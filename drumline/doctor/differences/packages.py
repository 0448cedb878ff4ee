"""Packages and variables that differ between hosts: host by host, so that an old environment is one line, not forty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.doctor.differences.groups import Row, row_of
from drumline.doctor.finding import Finding, Level
from drumline.text import join_names

MOST_PACKAGES = 10
MOST_FINDINGS = 5
# Compared by themselves.
TOLD_ELSEWHERE = {"torch", "drumline"}
# With these apart, ranks wait for each other, or fail to connect: what one sends the other does not expect.
MUST_AGREE = {
    "FI_PROVIDER",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_COMM_ID",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_FAMILY",
    "TORCH_DISTRIBUTED_DEBUG",
}
# What names a part of one machine, or only talks.
MAY_DIFFER = (
    "NCCL_CONF_FILE",
    "NCCL_DEBUG",
    "NCCL_GRAPH_",
    "NCCL_HOSTID",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_",
    "TORCH_NCCL_DEBUG_INFO",
)
COMPARED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "FI_PROVIDER")


def compare_packages(facts: Mapping[str, Mapping[str, Any]]) -> tuple[list[Finding], list[Row]]:
    """A line for each set of hosts that have other versions than most."""
    names = sorted({name for one in facts.values() for name in one["packages"]} - TOLD_ELSEWHERE)
    rows = []
    for name in names:
        row = row_of(name, {host: one["packages"].get(name) for host, one in facts.items()})
        if row.differs:
            rows.append(row)
    by_hosts: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_hosts.setdefault(row.odd, []).append(row)
    # Most differences first; a package that is different everywhere says the least.
    ordered = sorted(by_hosts.items(), key=lambda item: (-len(item[1]), len(item[0])))
    return [_packages(hosts, found) for hosts, found in ordered[:MOST_FINDINGS]], rows


def _packages(hosts: tuple[str, ...], rows: list[Row]) -> Finding:
    shown = "; ".join(f"{row.name} {row.text()}" for row in rows[:MOST_PACKAGES])
    more = f"; and {len(rows) - MOST_PACKAGES} others" if len(rows) > MOST_PACKAGES else ""
    count = f"{len(rows)} package{'s' if len(rows) != 1 else ''}"
    return Finding(
        level="warning",
        check="differences",
        where=join_names(hosts),
        what=f"not the same versions of {count} on all hosts: {shown}{more}",
        fix="pip freeze > all.txt on a host that is right, pip install -r all.txt there",
    )


def compare_variables(facts: Mapping[str, Mapping[str, Any]]) -> tuple[list[Finding], list[Row]]:
    """Each variable that is not set alike."""
    names = sorted({name for one in facts.values() for name in one["variables"] if _counts(name)})
    findings, rows = [], []
    for name in names:
        row = row_of(name, {host: one["variables"].get(name) for host, one in facts.items()}, unset="unset")
        rows.append(row)
        if row.differs:
            level: Level = "problem" if name in MUST_AGREE else "warning"
            usual = f"export {name}={row.usual}" if row.usual != "unset" else f"unset {name}"
            findings.append(
                row.finding(level, f"{usual} on all of them, or in the launcher's own environment")
            )
    return findings, rows


def _counts(name: str) -> bool:
    return name.startswith(COMPARED) and not name.startswith(MAY_DIFFER)
