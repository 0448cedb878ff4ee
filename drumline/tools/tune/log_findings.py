"""What the lines of logs show together: problems first, and causes before what follows from them.

problem: rank 3: CUDA out of memory (train.py, line 41, in step)
problem: rank 0: rank 3 did not join ALLREDUCE #12 within 10 min: ...
warning: every host: NCCL_ALGO differs across ranks: Ring, Tree
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, cast, get_args

from drumline.base.text import join_names
from drumline.tools.doctor.finding import LEVELS, Finding, Level
from drumline.tools.tune.job_faults import LoggedFault, LogMoment, PlainFault
from drumline.tools.tune.logged_links import LoggedLink
from drumline.tools.tune.nccl_log import NcclLog

Precedence = Literal[
    "cause",
    "explanation",
    "failure",
    "warned",
    "symptom",
    "disconnect",
    "condition",
    "outcome",
    "unexplained",
    "echo",
]
"""An explanation is a condition that explains a fault of these logs, or follows from several
lines. NCCL has warned of something that no message explains. An outcome is how a log or a job
ends."""
PRECEDENCES: tuple[Precedence, ...] = get_args(Precedence)
START = LogMoment((0, 0, 0.0), 0)
LAST = LogMoment((99, 0, 0.0), 0)
CONSEQUENCES: Set[Precedence] = {"symptom", "disconnect", "outcome", "echo"}
NO_INFINIBAND = ("no InfiniBand", "no InfiniBand library")
NCCLS_ERRORS = ("wrapped",)  # kinds of what NCCL reports to torch
UNEXPLAINED = "unknown"  # the check of a line that is shown as it is
NO_P2P = (
    "NCCL_P2P_DISABLE=1 shows whether it is that, and trains without it; then turn off ACS and the "
    "IOMMU (BIOS, iommu=pt), update the driver, or leave P2P off for GeForce cards; nvidia-smi topo -p2p r"
)
NO_RDMA = (
    "NCCL_NET_GDR_LEVEL=LOC, then NCCL_IB_DISABLE=1 show which part it is; ib_write_bw between the "
    "hosts; the same MTU and GID index everywhere; ACS off"
)
READ_FIRST = (
    "the job failed, and no other line shows why: read the lines around this one, and look for its "
    "text in the issues of that project; a newer NCCL or driver may have it fixed"
)
EXCEPTION_FIRST = (
    "correct this first: what other ranks report after it, such as time-outs and closed "
    "connections, follows from it; raised inside a package, it is often two packages of versions that "
    "do not fit together (pip list, on every host)"
)
BROKEN_P2P = (
    "P2P (peer-to-peer) between GPUs does not work on this host: PCIe ACS or an IOMMU, a virtual "
    "machine, or GeForce cards"
)
BROKEN_RDMA = (
    "no data passes between the network cards, or between cards and GPUs (GPUDirect RDMA, ACS, MTU, "
    "GID index)"
)
BROKEN_TCP = "no data passes between the hosts on NCCL's data ports: a firewall, or another MTU"
NO_DATA = "let the hosts reach each other on all TCP ports, the same MTU everywhere: drumline doctor --hosts A,B"


@dataclass(frozen=True)
class RankedFinding:
    """A finding, with what decides its place among the others."""

    finding: Finding
    precedence: Precedence
    moment: LogMoment = START
    """When the log first shows it."""
    comes_first: bool = False
    """Of those of the same precedence."""

    @property
    def order(self) -> tuple[int, int, bool, LogMoment]:
        """By this findings are sorted: by level, then by precedence, then by time.

        How a job ended says less than a warning about what it ran on."""
        is_end = self.precedence in ("outcome", "echo") and self.finding.level == "problem"
        level: Level = "warning" if is_end else self.finding.level
        return (
            LEVELS.index(level),
            PRECEDENCES.index(self.precedence),
            not self.comes_first,
            self.moment,
        )


def in_order(ranked: Iterable[RankedFinding]) -> list[Finding]:
    """The findings, the first to look at first.

    An echo counts only where nothing else is a problem. It shows that the job failed: an error
    that is not explained is then the likely cause, and comes first. So does what NCCL warned of
    where all problems follow from something else."""
    candidates = [*ranked]
    precedences = {item.precedence for item in candidates if item.finding.level == "problem"}

    if precedences - {"echo"}:
        candidates = [item for item in candidates if item.precedence != "echo"]

    if precedences and precedences <= CONSEQUENCES:
        # A time-out names ranks and likely causes, which says more than an error of any program.
        likely = {"warned"} if "symptom" in precedences else {"warned", "unexplained"}
        candidates = [
            _as_likely_cause(item) if item.precedence in likely else item for item in candidates
        ]

    return [item.finding for item in sorted(candidates, key=lambda item: item.order)]


def _as_likely_cause(item: RankedFinding) -> RankedFinding:
    """A line that is not explained becomes a problem; other findings stay."""
    if item.finding.check != UNEXPLAINED:
        return item

    finding = replace(item.finding, level="problem", fix=READ_FIRST)
    return replace(item, finding=finding, precedence="warned")


def _fault_findings(log: NcclLog, transports: Collection[str]) -> Iterator[RankedFinding]:
    """Messages that are known, and exceptions and lines that are not explained.

    `transports`: those between hosts."""
    faults = log.faults
    kinds = faults.kinds()
    failures = faults.failures()
    last_wait = faults.last_wait()

    for fault in faults.messages.values():
        message = fault.read.message
        if message.only_over and message.only_over not in transports:
            continue
        if message.at_end and fault is not last_wait:
            continue

        level, precedence = _weight_of(fault, kinds, failures)
        if fault is last_wait and kinds:
            level = "problem"  # of a job that was then ended
            precedence = "explanation"

        # What NCCL says of itself is more than a launcher's summary.
        comes_first = fault.origin in faults.failed_first or message.kind in NCCLS_ERRORS
        finding = _message_finding(log, fault, level)
        yield RankedFinding(finding, precedence, fault.moment, comes_first)

    for plain in faults.plain.values():
        finding = _plain_finding(plain, log.name_of(plain.origin))
        precedence = "warned" if plain.is_warning else "unexplained"

        yield RankedFinding(
            faults.context.refined(finding, plain.places),
            "failure" if plain.is_exception else precedence,
            plain.moment,
            plain.origin in faults.failed_first,
        )


def _message_finding(log: NcclLog, fault: LoggedFault, level: Level) -> Finding:
    """What a message that is known says, and what the lines around it add."""
    message = fault.read.message
    context = log.faults.context
    what = _with_frame(fault.read.what, fault.frame)
    if message.shows_work and context.work:
        what = f"{what}; the last work in the log: {context.work}"

    finding = Finding(level, message.kind, log.name_of(fault.origin), what, fault.read.fix)
    finding = context.refined(finding, fault.places)
    if not log.rdma_setting or message.kind not in NO_INFINIBAND:
        return finding

    what = f"{finding.what}; this job is meant to use InfiniBand ({log.rdma_setting})"
    return replace(finding, level="problem", what=what)


def _weight_of(
    fault: LoggedFault,
    kinds: Set[str],
    failures: Set[str],
) -> tuple[Level, Precedence]:
    """How much a fault says: a message may be a cause in one log, and a consequence in another.

    `kinds`: of all faults; `failures`: of those that do not only follow from others."""
    message = fault.read.message
    if not kinds.isdisjoint(message.explains):
        # A failure that it does not explain is the likelier reason of what it explains.
        is_alone = failures <= {*message.explains}
        return "problem", "explanation" if is_alone else "symptom"

    precedence = cast(Precedence, message.role)
    if fault.is_info and precedence == "cause":
        # NCCL went on: what stopped the job is another line, if there is one.
        return message.level, "explanation"

    return message.level, precedence


def _with_frame(what: str, frame: str) -> str:
    """`CUDA out of memory (train.py, line 41, in step: loss.backward())`."""
    return f"{what} ({frame})" if frame else what


def _plain_finding(fault: PlainFault, where: str) -> Finding:
    """An exception is a problem; a line that only looks like an error is a warning:

    problem: rank 0: the program raised KeyError: 'label' (data.py, line 7, in get)
    warning: train.log: E0612 10:00:00 worker.cc:41] lost a block (3 more like it)
    """
    what = fault.text
    if fault.num_like_it > 1:
        what += f" ({fault.num_like_it - 1} more like it)"

    if fault.is_exception:
        what = _with_frame(f"the program raised {what}", fault.frame)
        return Finding("problem", "exception", where, what, EXCEPTION_FIRST)

    return Finding("warning", UNEXPLAINED, where, what)


def _wait_findings(log: NcclLog, transports: Collection[str]) -> Iterator[RankedFinding]:
    """Collectives that timed out; where it was the first one, also over what it never finished.

    `transports`: of ranks whose communicator was complete."""
    faults = log.faults
    moment = faults.first_wait or START

    for wait in faults.waits.explanations(faults.ranks | log.ranks.keys(), faults.context.work):
        finding = faults.context.refined(wait.finding, faults.wait_places)
        yield RankedFinding(finding, "failure" if wait.is_cause else "symptom", moment)

        silent_path = _silent_path(transports) if wait.is_early else None
        if silent_path is not None:
            path, fix = silent_path
            what = f"all ranks were connected, and the first collective never finished: {path}"
            finding = Finding("problem", "silent link", wait.finding.where, what, fix)
            yield RankedFinding(finding, "failure", moment)


def _silent_path(transports: Collection[str]) -> tuple[str, str] | None:
    """Over what the first data never arrived although the ranks were connected, and the fix."""
    if any(transport.startswith("P2P") for transport in transports):
        return BROKEN_P2P, NO_P2P

    networks = [transport for transport in transports if transport.startswith("NET")]
    if any("Socket" not in network for network in networks):
        return BROKEN_RDMA, NO_RDMA

    return (BROKEN_TCP, NO_DATA) if networks else None


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
SAME_SETTINGS = (
    "the same driver and the same NCCL_* variables on every host (also in /etc/nccl.conf and "
    "~/.nccl.conf): drumline doctor --hosts A,B shows what differs"
)
# Faults that follow from settings that differ.
OF_DIFFERENCES = {
    "mismatch",
    "bootstrap",
    "topologies differ",
    "collective timeout",
    "NCCL timeout",
}
SAME_TORCH = "install the same torch on all hosts: drumline doctor --hosts A,B shows what differs"


def log_findings(log: NcclLog) -> list[Finding]:
    """All that the logs show, the first to look at first: what the lines say themselves, and what
    follows from several of them, such as settings that differ across ranks."""
    links = log.links()
    hosts = {rank: process.host for rank, process in log.ranks.items() if process.is_named}
    between_hosts = {link.transport for link in links if not _is_inside(link, hosts)}
    parts = (
        _differences(log),
        _fault_findings(log, between_hosts | _chosen_transports(log, hosts)),
        _wait_findings(log, _connected_transports(log, links)),
        _interface_findings(log),
        _link_findings(links, hosts),
        _network_findings(log, between_hosts),
        _progress_findings(log),
    )

    return in_order(chain.from_iterable(parts))


def has_trouble(findings: Iterable[Finding]) -> bool:
    """Whether a log shows a problem, or a line that may be one and is not explained."""
    return any(finding.level == "problem" or finding.check == UNEXPLAINED for finding in findings)


def _is_inside(link: LoggedLink, hosts: Mapping[int, str]) -> bool:
    """Whether both ranks are known to be on one host."""
    host = hosts.get(link.source) if link.is_global else None
    return host is not None and host == hosts.get(link.target)


def _chosen_transports(log: NcclLog, hosts: Mapping[int, str]) -> set[str]:
    """Those of processes whose connections to other hosts may not be in the log."""
    has_all_ranks = len(hosts) == log.world_size
    is_one_host = has_all_ranks and len(set(hosts.values())) == 1
    uses_tcp = any(process.network == "Socket" for process in log.processes.values())

    return {"NET/Socket"} if uses_tcp and not is_one_host else set()


def _connected_transports(log: NcclLog, links: Iterable[LoggedLink]) -> set[str]:
    """Those of a job whose communicators are complete."""
    processes = log.ranks.values()
    if not processes or not all(process.is_complete for process in processes):
        return set()

    return {link.transport for link in links}


def _differences(log: NcclLog) -> Iterator[RankedFinding]:
    """Versions, variables and networks of NCCL that differ across ranks:

    problem: every host: the version of NCCL differs across ranks: 2.21.5, 2.27.3
    warning: every host: NCCL_ALGO differs across ranks: Ring, Tree
    """
    if versions := log.differing_versions():
        what = f"the version of NCCL differs across ranks: {', '.join(versions)}"
        finding = Finding("problem", "version", "every host", what, SAME_TORCH)
        yield RankedFinding(finding, "cause")

    is_variable_cause = not log.faults.kinds().isdisjoint(OF_DIFFERENCES)
    for name, values in log.differing_settings().items():
        is_cause = is_variable_cause and name.startswith("NCCL")
        level: Level = "problem" if is_cause else "warning"
        what = f"{name} differs across ranks: {', '.join(values)}"
        finding = Finding(level, "settings", "every host", what, SAME_SETTINGS)
        yield RankedFinding(finding, "cause" if is_cause else "condition")

    networks = {process.network for process in log.processes.values() if process.network}
    if len(networks) > 1:
        what = (
            f"the network of NCCL differs across ranks: {', '.join(sorted(networks))}; "
            "InfiniBand or a plugin works on some hosts only, and different networks do not "
            "connect"
        )
        finding = Finding("problem", "network", "every host", what, SAME_CARDS)
        yield RankedFinding(finding, "explanation")


def _interface_findings(log: NcclLog) -> Iterator[RankedFinding]:
    """Interfaces by which the ranks of several hosts cannot meet:

    problem: gpu-01: NCCL uses docker0 (172.17.0.1), a bridge of containers, ...
    warning: gpu-02: eth0 and eth1 are in the same network (10.0.0.0/16): ...
    """
    addresses = {
        process.host: process.bootstrap
        for process in log.processes.values()
        if process.bootstrap[0]
    }
    has_many_hosts = len(addresses) > 1
    is_unreached = not log.faults.kinds().isdisjoint(UNREACHED)
    # A failure of another kind is the likelier reason of connections that fail.
    is_alone = log.faults.failures() <= {*UNREACHED}
    precedence: Precedence = "explanation" if is_alone else "symptom"
    level: Level = "problem" if is_unreached else "warning"

    for host, (interface, address) in addresses.items():
        is_bridge = interface.startswith(BRIDGES) or address.startswith(LINK_LOCAL)
        if has_many_hosts and (interface == "lo" or address.startswith("127.")):
            yield _loopback_finding(host, f"{interface} {address}")
        elif is_bridge and (has_many_hosts or is_unreached):
            what = (
                f"NCCL uses {interface} ({address}), a bridge of containers, a tunnel or a "
                "link of this board, which most often reaches no other host"
            )
            finding = Finding(level, "interface", host, what, OTHER_INTERFACE)
            yield RankedFinding(finding, precedence)

    for host, interfaces in log.routes.shared_networks().items():
        what = (
            f"{interfaces}: the kernel's routing decides which of them sends, whatever "
            "NCCL_SOCKET_IFNAME says"
        )
        finding = Finding(level, "shared network", host, what, OTHER_SUBNET)
        yield RankedFinding(finding, precedence if is_unreached else "condition")

    # Hosts of one cluster differ in the second half of their addresses.
    networks = {tuple(address.split(".")[:2]) for _, address in addresses.values()}
    if is_unreached and len(networks) > 1:
        names = [f"{host}: {' '.join(bootstrap)}" for host, bootstrap in addresses.items()]
        what = f"hosts chose interfaces in different networks: {join_names(names)}"
        finding = Finding("problem", "interface", "every host", what, OTHER_INTERFACE)
        yield RankedFinding(finding, precedence)


def _loopback_finding(where: str, device: str) -> RankedFinding:
    """`where`: a host, or the ranks of a link; `device`: `lo 127.0.0.1`."""
    what = f"NCCL uses the loopback ({device}), which reaches no other host"
    finding = Finding("problem", "interface", where, what, OTHER_INTERFACE)
    return RankedFinding(finding, "explanation")


def _link_findings(
    links: Sequence[LoggedLink],
    hosts: Mapping[int, str],
) -> Iterator[RankedFinding]:
    """Links over the wrong interface, and networks that are used where there is better:

    warning: ranks 0 and 1: they are on one host (gpu-01) and use the network: ...
    """
    is_one_host = len(set(hosts.values())) <= 1
    for link in links:
        pair = f"ranks {link.source} and {link.target}{'' if link.is_global else OF_GROUP}"
        if link.device.startswith("lo ") and not is_one_host:
            yield _loopback_finding(pair, link.device)

        elif link.transport.startswith("NET") and _is_inside(link, hosts):
            what = f"they are on one host ({hosts[link.source]}) and use the network: neither P2P nor shared memory"
            fix = "unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID; start containers with --ipc=host"
            finding = Finding("warning", "transport", pair, what, fix)
            yield RankedFinding(finding, "condition")


def _network_findings(log: NcclLog, between_hosts: Collection[str]) -> Iterator[RankedFinding]:
    """What slows the network between hosts: no GPUDirect, or TCP where there may be better.

    `between_hosts`: the transports."""
    for host in log.connections.hosts_without_gpu_direct():
        what = (
            "InfiniBand is used without GPUDirect RDMA (no GDRDMA in the connections of this host): "
            "data goes through host memory"
        )
        finding = Finding("warning", "GPUDirect RDMA off", host, what, GPU_DIRECT)
        yield RankedFinding(finding, "condition")

    if "NET/Socket" not in between_hosts:
        return

    for process in log.processes.values():
        if process.missing_plugin and process.network == "Socket":
            what = f"NCCL found neither InfiniBand nor a plugin ({process.missing_plugin}), and uses TCP"
            fix = "where there is EFA or InfiniBand: install its plugin or driver (drumline tune --hosts A,B)"
            # On AWS the plugin is what is missing; elsewhere more likely InfiniBand.
            moment = START if EC2_HOST.match(process.host) else LAST
            finding = Finding("note", "network", process.name, what, fix)
            yield RankedFinding(finding, "condition", moment)


def _progress_findings(log: NcclLog) -> Iterator[RankedFinding]:
    """Ranks that never finished their initialization, and ranks without a log:

    problem: rank 3 on gpu-02: it began to initialize a communicator, and ...
    note: every host: no log of 2 of 8 ranks, the first is rank 6
    """
    ranks = log.ranks
    incomplete = [process for process in ranks.values() if not process.is_complete]

    for process in () if log.is_partial else incomplete:
        what = "it began to initialize a communicator, and never finished"
        fix = (
            "another rank did not join, or failed: read the messages above, and the logs of the other "
            "ranks; if all began: NCCL_SOCKET_IFNAME with the interface that joins the hosts, open TCP "
            "ports (firewall), NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 show which path hangs"
        )
        finding = Finding("problem", "initialization", process.name, what, fix)
        yield RankedFinding(finding, "outcome", LAST)

    missing = sorted(set(range(min(log.world_size, MAX_RANKS))) - ranks.keys())
    if missing:
        what = f"no log of {len(missing)} of {log.world_size} ranks, the first is rank {missing[0]}"
        fix = "export NCCL_DEBUG_FILE=nccl.%h.%p.log, and give all files"
        finding = Finding("note", "logs", "every host", what, fix)
        yield RankedFinding(finding, "unexplained", LAST)
