"""What the logs of a job show, as lines for people or as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drumline.base.text import join_names, named_ranks, plural
from drumline.tools.doctor.doctor_report import finding_lines, once_each
from drumline.tools.doctor.finding import Finding
from drumline.tools.tune import logged_links
from drumline.tools.tune.log_findings import OF_GROUP, UNEXPLAINED, log_findings
from drumline.tools.tune.logged_links import LoggedLink
from drumline.tools.tune.nccl_log import NcclLog

MAX_PAIRS = 8
MAX_HOSTS = 16


def log_as_json(log: NcclLog) -> dict[str, Any]:
    """The report for programs."""
    ranks = [
        {
            "rank": rank,
            "host": process.host,
            "pid": process.pid,
            "network": process.network,
            "devices": process.devices,
        }
        for rank, process in log.ranks.items()
    ]

    return {
        "versions": sorted(log.versions),
        "world_size": log.world_size,
        "ranks": ranks,
        "links": [asdict(link) for link in log.links()],
        "findings": [finding.as_json() for finding in log_findings(log)],
        "lines": log.num_lines,
        "partial": log.is_partial,
    }


def log_lines(log: NcclLog) -> Iterator[str]:
    """The report for people: a summary, the hosts, the links and the findings:

    NCCL 2.21.5+cuda12.4: logs of 4 of 4 ranks on 2 hosts, network Socket
      gpu-01: ranks 0 and 1; eth0 10.0.0.4
      gpu-02: ranks 2 and 3; eth0 10.0.0.5
    P2P/CUMEM: 0 <-> 1 and 2 <-> 3 (2 channels)
    NET/Socket over eth0 10.0.0.4: 1 -> 2 (2 channels)
    warning: ...
    result: no problem in these logs, with 1 warning
    """
    findings = log_findings(log)
    yield _summary(log)
    yield from _hosts(log)
    yield from _links(log.links())

    if log.is_partial:
        limits = f"of a long log the beginning and the end, and {logged_links.MAX_CONNECTIONS:,} connections at most"
        yield f"note: not all was read: {limits}"

    yield from (line for _, line in finding_lines(findings))
    yield _result(findings)


def _result(findings: Sequence[Finding]) -> str:
    """The last line of the report: `result: 2 problems, the first to look at: rank 3 on gpu-02`."""
    problems = [finding for finding in findings if finding.level == "problem"]
    if problems:
        count = plural(len(problems), "problem")
        return f"result: {count}, the first to look at: {problems[0].where}"

    unexplained = [finding for finding in findings if finding.check == UNEXPLAINED]
    if unexplained:
        count = plural(len(unexplained), "line")
        return f"result: {count} that may be errors and are not explained here: read them first"

    warnings = [finding for finding in once_each(findings) if finding.level == "warning"]
    counted = f", with {plural(len(warnings), 'warning')}" if warnings else ""
    return f"result: no problem in these logs{counted}"


def _summary(log: NcclLog) -> str:
    """Versions, ranks, hosts and networks in one line:

    NCCL 2.21.5+cuda12.4: logs of 7 of 8 ranks on 2 hosts, network Socket
    """
    ranks = log.ranks
    if not log.num_lines:
        return "no line of NCCL in these logs (NCCL_DEBUG=INFO writes them): read for messages of torch and others"

    versions = "NCCL of an unknown version"
    if log.versions:
        versions = f"NCCL {join_names(sorted(log.versions))}"
    if not ranks:
        return f"{versions}: no communicator was initialized in these logs"

    networks = sorted({process.network for process in ranks.values() if process.network})
    hosts = plural(len({process.host for process in ranks.values()}), "host")
    network = f", network {join_names(networks)}" if networks else ""

    return (
        f"{versions}: logs of {len(ranks)} of {plural(log.world_size, 'rank')} on {hosts}{network}"
    )


def _hosts(log: NcclLog) -> Iterator[str]:
    """A line for each host, with its ranks and network devices: `gpu-01: ranks 0 and 1; eth0`."""
    processes = log.ranks
    hosts: dict[str, list[int]] = {}
    for rank, process in processes.items():
        hosts.setdefault(process.host, []).append(rank)

    for host, ranks in list(hosts.items())[:MAX_HOSTS]:
        devices = sorted({device for rank in ranks for device in processes[rank].devices.values()})
        with_devices = f"; {join_names(devices)}" if devices else ""
        yield f"  {host}: {named_ranks(ranks)}{with_devices}"

    if len(hosts) > MAX_HOSTS:
        yield f"  and {len(hosts) - MAX_HOSTS} more hosts; --json has all"


def _links(links: Sequence[LoggedLink]) -> Iterator[str]:
    """A line for each transport and device, with the ranks that it connects:

    NET/IB/GDRDMA over mlx5_0 1/RoCE: 0 <-> 2 and 1 <-> 3 (4 channels)
    """
    groups: dict[tuple[str, str, bool], dict[tuple[int, int], int]] = {}
    for link in links:
        channels_of_pair = groups.setdefault((link.transport, link.device, link.is_global), {})
        channels_of_pair[link.source, link.target] = link.num_channels

    for (transport, device, is_global), pairs in groups.items():
        over = f" over {device}" if device else ""
        channels = plural(max(pairs.values()), "channel")
        of_group = "" if is_global else f"; ranks{OF_GROUP}"
        shown = join_names(_arrows(pairs), most=MAX_PAIRS)
        yield f"{transport}{over}: {shown} ({channels}{of_group})"


def _arrows(pairs: Collection[tuple[int, int]]) -> Iterator[str]:
    """`0 -> 1`, or once `0 <-> 1` for two ranks that send to each other."""
    for source, target in pairs:
        if (target, source) not in pairs:
            yield f"{source} -> {target}"
        elif source < target:
            yield f"{source} <-> {target}"
