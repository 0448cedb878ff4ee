"""What the lines of logs show together: problems first, and causes before what follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from drumline.base.text import join_names
from drumline.tools.doctor.finding import Finding, Level
from drumline.tools.tune.logged_links import LoggedLink
from drumline.tools.tune.nccl_log import NcclLog
from drumline.tools.tune.ranked_findings import (
    LAST,
    START,
    UNEXPLAINED,
    Precedence,
    RankedFinding,
    fault_findings,
    in_order,
    wait_findings,
)

MAX_RANKS = 50_000
EC2_HOST = re.compile(r"ip-\d+-\d+-\d+-\d+\b")
OF_GROUP = " of an unknown communicator"
OTHER_INTERFACE = "export NCCL_SOCKET_IFNAME with the interface that the other hosts reach: drumline tune --hosts A,B"
SAME_CARDS = (
    "make InfiniBand and the plugins work on all hosts, or on none: NCCL_IB_DISABLE=1 or "
    "NCCL_NET=Socket everywhere"
)
OTHER_SUBNET = (
    "give each interface a subnet of its own, or the fast one the lower route metric; ip route get "
    "ADDRESS shows which one sends"
)
GPU_DIRECT = (
    "modprobe nvidia-peermem on every host, or a kernel and driver with DMA-BUF; nvidia-smi topo "
    "-m (NCCL_NET_GDR_LEVEL)"
)
# Kinds of faults of connections that were not made.
UNREACHED = (
    "timeout", "route", "refused", "loopback", "container bridge", "socket", "store", "first collective",
)  # fmt: skip
BRIDGES = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "cilium", "tun", "tailscale", "zt", "wg", "lxc", "kube",
)  # fmt: skip
LINK_LOCAL = ("169.254.", "fe80")
SAME_TORCH = "install the same torch on all hosts: drumline doctor --hosts A,B shows what differs"


def log_findings(log: NcclLog) -> list[Finding]:
    links = log.links()
    return in_order(
        [
            *_differences(log),
            *fault_findings(
                log.faults,
                name_of=log.name_of,
                transports=_transports_between(log, links) | _chosen_transports(log),
                expected_rdma=log.rdma_setting,
            ),
            *wait_findings(
                log.faults, ranks=set(log.ranks), links=_connected_transports(log, links)
            ),
            *_interface_findings(log),
            *_link_findings(log, links),
            *_progress_findings(log),
        ]
    )


def has_trouble(findings: Iterable[Finding]) -> bool:
    """Whether a log shows a problem, or a line that may be one and is not explained."""
    return any(finding.level == "problem" or finding.check == UNEXPLAINED for finding in findings)


def _is_inside(link: LoggedLink, hosts: Mapping[int, str]) -> bool:
    """Whether both ranks are known to be on one host."""
    host = hosts.get(link.source) if link.is_global else None
    return host is not None and host == hosts.get(link.target)


def _hosts_of_ranks(log: NcclLog) -> dict[int, str]:
    """Of those whose lines name their host."""
    return {rank: process.host for rank, process in log.ranks.items() if process.is_named}


def _transports_between(log: NcclLog, links: Iterable[LoggedLink]) -> set[str]:
    hosts = _hosts_of_ranks(log)
    return {link.transport for link in links if not _is_inside(link, hosts)}


def _chosen_transports(log: NcclLog) -> set[str]:
    """Those of processes whose connections to other hosts may not be in the log."""
    hosts = _hosts_of_ranks(log)
    if len(hosts) == log.world_size and len(set(hosts.values())) == 1:
        return set()
    return {"NET/Socket" for process in log.processes.values() if process.network == "Socket"}


def _chosen_transports(log: NcclLog) -> set[str]:
    """Those of processes whose connections to other hosts may not be in the log."""
    hosts = _hosts_of_ranks(log)
    if len(hosts) == log.world_size and len(set(hosts.values())) == 1:
        return set()
    return {"NET/Socket" for process in log.processes.values() if process.network == "Socket"}


def _connected_transports(log: NcclLog, links: Iterable[LoggedLink]) -> set[str]:
    """Those of a job whose communicators are complete."""
    processes = log.ranks.values()
    if not processes or not all(process.is_complete for process in processes):
        return set()
    return {link.transport for link in links}


def _differences(log: NcclLog) -> Iterator[RankedFinding]:
    if versions := log.differing_versions():
        what = f"the version of NCCL differs across ranks: {', '.join(versions)}"
        yield RankedFinding.of("cause", "problem", "version", "every host", what, SAME_TORCH)
    networks = {process.network for process in log.processes.values() if process.network}
    if len(networks) > 1:
        what = (
            f"the network of NCCL differs across ranks: {', '.join(sorted(networks))}; "
            "InfiniBand or a plugin works on some hosts only, and different networks do not "
            "connect"
        )
        yield RankedFinding.of("explanation", "problem", "network", "every host", what, SAME_CARDS)


def _interface_findings(log: NcclLog) -> Iterator[RankedFinding]:
    """Interfaces by which the ranks of several hosts cannot meet."""
    addresses = {
        process.host: process.bootstrap
        for process in log.processes.values()
        if process.bootstrap[0]
    }
    is_unreached = not log.faults.kinds().isdisjoint(UNREACHED)
    # A failure of another kind is the likelier reason of connections that fail.
    is_alone = log.faults.failures() <= {*UNREACHED}
    precedence: Precedence = "explanation" if is_alone else "symptom"
    for host, (interface, address) in addresses.items():
        is_loopback = interface == "lo" or address.startswith("127.")
        if len(addresses) > 1 and is_loopback:
            what = f"NCCL uses the loopback ({interface} {address}), which reaches no other host"
            yield _interface_finding("problem", host, what)
        elif (interface.startswith(BRIDGES) or address.startswith(LINK_LOCAL)) and (
            len(addresses) > 1 or is_unreached
        ):
            what = (
                f"NCCL uses {interface} ({address}), a bridge of containers, a tunnel or a "
                "link of this board, which most often reaches no other host"
            )
            level: Level = "problem" if is_unreached else "warning"
            yield replace(_interface_finding(level, host, what), precedence=precedence)
    yield from _shared_network_findings(log, precedence if is_unreached else "condition")
    if is_unreached and len({_network_of(address) for _, address in addresses.values()}) > 1:
        names = [f"{host}: {' '.join(bootstrap)}" for host, bootstrap in addresses.items()]
        what = f"hosts chose interfaces in different networks: {join_names(names)}"
        yield replace(_interface_finding("problem", "every host", what), precedence=precedence)


def _shared_network_findings(log: NcclLog, precedence: Precedence) -> Iterator[RankedFinding]:
    level: Level = "warning" if precedence == "condition" else "problem"
    for shared in log.routes.shared_networks():
        names = join_names(shared.interfaces)
        what = (
            f"{names} are in the same network ({shared.network}): the kernel's routing decides which "
            "of them sends, whatever NCCL_SOCKET_IFNAME says"
        )
        yield RankedFinding.of(precedence, level, "shared network", shared.host, what, OTHER_SUBNET)


def _link_findings(log: NcclLog, links: Sequence[LoggedLink]) -> Iterator[RankedFinding]:
    """Links over the wrong interface, and networks that are used where there is better."""
    hosts = _hosts_of_ranks(log)
    is_one_host = len(set(hosts.values())) <= 1
    for link in links:
        pair = f"ranks {link.source} and {link.target}{'' if link.is_global else OF_GROUP}"
        if link.device.startswith("lo ") and not is_one_host:
            what = f"NCCL uses the loopback ({link.device}), which reaches no other host"
            yield _interface_finding("problem", pair, what)
        elif link.transport.startswith("NET") and _is_inside(link, hosts):
            what = f"they are on one host ({hosts[link.source]}) and use the network: neither P2P nor shared memory"
            fix = "unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID; start containers with --ipc=host"
            yield RankedFinding.of("condition", "warning", "transport", pair, what, fix)
    transports = _transports_between(log, links)
    for host in log.hosts_without_gpu_direct():
        what = (
            "InfiniBand is used without GPUDirect RDMA (no GDRDMA in the connections of this host): "
            "data goes through host memory"
        )
        yield RankedFinding.of("condition", "warning", "GPUDirect RDMA off", host, what, GPU_DIRECT)
    if "NET/Socket" in transports:
        yield from _missing_plugins(log)


def _missing_plugins(log: NcclLog) -> Iterator[RankedFinding]:
    for process in log.processes.values():
        if process.missing_plugin and process.network == "Socket":
            what = f"NCCL found neither InfiniBand nor a plugin ({process.missing_plugin}), and uses TCP"
            fix = "where there is EFA or InfiniBand: install its plugin or driver (drumline tune --hosts A,B)"
            # On AWS the plugin is what is missing; elsewhere more likely InfiniBand.
            moment = START if EC2_HOST.match(process.host) else LAST
            yield RankedFinding.of(
                "condition", "note", "network", process.name, what, fix, moment=moment
            )


def _progress_findings(log: NcclLog) -> Iterator[RankedFinding]:
    """Ranks that never finished their initialization, and ranks without a log."""
    ranks = log.ranks
    if not log.is_partial:
        what = "it began to initialize a communicator, and never finished"
        fix = "another rank did not join, or failed: read the messages above, and the logs of the other ranks"
        for process in ranks.values():
            if not process.is_complete:
                yield RankedFinding.of(
                    "outcome", "problem", "initialization", process.name, what, fix, moment=LAST
                )
    missing = sorted(set(range(min(log.world_size, MAX_RANKS))) - ranks.keys())
    if missing:
        what = f"no log of {len(missing)} of {log.world_size} ranks, the first is rank {missing[0]}"
        fix = "export NCCL_DEBUG_FILE=nccl.%h.%p.log, and give all files"
        yield RankedFinding.of("unexplained", "note", "logs", "every host", what, fix, moment=LAST)


def _interface_finding(level: Level, where: str, what: str) -> RankedFinding:
    finding = Finding(level, "interface", where, what, OTHER_INTERFACE)
    return RankedFinding(finding=finding, precedence="explanation")


def _network_of(address: str) -> str:
    """Its first half: hosts of one cluster differ in the other one."""
    return ".".join(address.split(".")[:2])
