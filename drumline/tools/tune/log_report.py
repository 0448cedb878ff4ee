"""What NCCL's logs show, as lines for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drumline.base.text import join_names, named_ranks, plural
from drumline.tools.doctor.doctor_report import finding_lines
from drumline.tools.tune import nccl_log
from drumline.tools.tune.nccl_log import OF_GROUP, LoggedLink, NcclLog

MAX_PAIRS = 8
MAX_HOSTS = 16


def log_as_json(log: NcclLog) -> dict[str, Any]:
    return {
        "versions": sorted(log.versions),
        "world_size": log.world_size,
        "ranks": [
            {
                "rank": rank,
                "host": one.host,
                "pid": one.pid,
                "network": one.network,
                "devices": one.devices,
            }
            for rank, one in log.ranks.items()
        ],
        "links": [asdict(link) for link in log.links()],
        "findings": [finding.as_json() for finding in log.findings()],
        "lines": log.num_lines,
        "partial": log.is_partial,
    }


def log_lines(log: NcclLog) -> Iterator[str]:
    findings = log.findings()
    yield _summary(log)
    yield from _hosts(log)
    yield from _links(log.links())
    if log.is_partial:
        what = f"of a long log the beginning and the end, and {nccl_log.MAX_KEPT:,} connections at most"
        yield f"note: not all was read: {what}"
    yield from (line for _, line in finding_lines(findings))
    problems = [finding for finding in findings if finding.level == "problem"]
    first = f", the first to look at: {problems[0].where}" if problems else ""
    yield (
        f"result: {plural(len(problems), 'problem')}{first}"
        if problems
        else "result: no problem in these logs"
    )


def _summary(log: NcclLog) -> str:
    ranks = log.ranks
    versions = (
        f"NCCL {join_names(sorted(log.versions))}" if log.versions else "NCCL of an unknown version"
    )
    if not ranks:
        return f"{versions}: no communicator was initialized in these logs"
    networks = sorted({one.network for one in ranks.values() if one.network})
    hosts = plural(len({one.host for one in ranks.values()}), "host")
    network = f", network {join_names(networks)}" if networks else ""
    return (
        f"{versions}: logs of {len(ranks)} of {plural(log.world_size, 'rank')} on {hosts}{network}"
    )


def _hosts(log: NcclLog) -> Iterator[str]:
    processes = log.ranks
    hosts: dict[str, list[int]] = {}
    for rank, process in processes.items():
        hosts.setdefault(process.host, []).append(rank)
    for host, ranks in list(hosts.items())[:MAX_HOSTS]:
        devices = sorted({device for rank in ranks for device in processes[rank].devices.values()})
        yield f"  {host}: {named_ranks(ranks)}{f'; {join_names(devices)}' if devices else ''}"
    if len(hosts) > MAX_HOSTS:
        yield f"  and {len(hosts) - MAX_HOSTS} more hosts; --json has all"


def _links(links: Sequence[LoggedLink]) -> Iterator[str]:
    """A line for each transport and device: which ranks it connects."""
    groups: dict[tuple[str, str, bool], dict[tuple[int, int], int]] = {}
    for link in links:
        found = groups.setdefault((link.transport, link.device, link.is_global), {})
        found[link.source, link.target] = link.num_channels
    for (transport, device, is_global), pairs in groups.items():
        shown = [
            f"{source} {'<->' if (target, source) in pairs else '->'} {target}"
            for source, target in pairs
            if source < target or (target, source) not in pairs
        ]
        over = f" over {device}" if device else ""
        channels = plural(max(pairs.values()), "channel")
        of = "" if is_global else f"; ranks{OF_GROUP}"
        yield f"{transport}{over}: {join_names(shown, most=MAX_PAIRS)} ({channels}{of})"
