"""What the lines of logs show together: problems first, and causes before what follows from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, Self, cast, get_args

from drumline.base.text import join_names, plural
from drumline.tools.doctor.finding import LEVELS, Finding, Level
from drumline.tools.tune.job_faults import JobFaults, LoggedFault, LogMoment, PlainFault
from drumline.tools.tune.known_messages import LinePlace
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
CONSEQUENCES: tuple[Precedence, ...] = ("symptom", "disconnect", "outcome", "echo")
NO_INFINIBAND = ("no InfiniBand", "no InfiniBand library")
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
    "connections, follows from it"
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


@dataclass(frozen=True, kw_only=True)
class RankedFinding:
    finding: Finding
    precedence: Precedence
    moment: LogMoment = START

    @classmethod
    def of(
        cls,
        precedence: Precedence,
        level: Level,
        check: str,
        where: str,
        what: str,
        fix: str = "",
        moment: LogMoment = START,
    ) -> Self:
        finding = Finding(level, check, where, what, fix)
        return cls(finding=finding, precedence=precedence, moment=moment)

    @property
    def order(self) -> tuple[int, int, LogMoment]:
        """How a job ended says less than a warning about what it ran on."""
        is_end = self.precedence in ("outcome", "echo") and self.finding.level == "problem"
        level: Level = "warning" if is_end else self.finding.level
        return (LEVELS.index(level), PRECEDENCES.index(self.precedence), self.moment)


def in_order(ranked: Iterable[RankedFinding]) -> list[Finding]:
    """An echo counts only where nothing else is a problem. It shows that the job failed: an error
    that is not explained is then the likely cause, and comes first. So does what NCCL warned of
    where all problems follow from something else."""
    candidates = [*ranked]
    problems = [item for item in candidates if item.finding.level == "problem"]
    echoes = [item for item in problems if item.precedence == "echo"]
    if len(echoes) < len(problems):
        candidates = [item for item in candidates if item.precedence != "echo"]
    elif echoes:
        candidates = [_as_likely_cause(item) for item in candidates]
    if problems and all(item.precedence in CONSEQUENCES for item in problems):
        # A time-out names ranks and likely causes, which says more than an error of any program.
        is_explained = any(item.precedence == "symptom" for item in problems)
        likely = ("warned",) if is_explained else ("warned", "unexplained")
        candidates = [
            _as_likely_cause(item) if item.precedence in likely else item for item in candidates
        ]
    return [item.finding for item in sorted(candidates, key=lambda item: item.order)]


def _as_likely_cause(item: RankedFinding) -> RankedFinding:
    if item.finding.check != UNEXPLAINED:
        return item
    finding = replace(item.finding, level="problem", fix=READ_FIRST)
    return replace(item, finding=finding, precedence="warned")


def fault_findings(
    faults: JobFaults,
    *,
    name_of: Callable[[str], str],
    transports: Collection[str],
    expected_rdma: str,
) -> Iterator[RankedFinding]:
    """`name_of`: the name of an origin; `transports`: those between hosts; `expected_rdma`: what
    shows that InfiniBand is to be used."""
    kinds = faults.kinds()
    failures = faults.failures()
    counts = Counter(fault.message.kind for fault in faults.messages.values())
    for fault in faults.messages.values():
        only_over = fault.message.only_over
        if not only_over or only_over in transports:
            where = name_of(fault.origin)
            ranked = _message_finding(fault, where, faults.work, kinds, failures)
            is_repeated = counts[fault.message.kind] > 1
            ranked = _refined(ranked, faults, fault.places, is_repeated=is_repeated)
            is_missed = expected_rdma and fault.message.kind in NO_INFINIBAND
            yield _as_missed(ranked, expected_rdma) if is_missed else ranked
    for plain in faults.plain.values():
        ranked = _plain_finding(plain, name_of(plain.origin))
        yield _refined(ranked, faults, plain.places, is_repeated=False)
    if faults.num_unkept:
        what = f"{plural(faults.num_unkept, 'more line')} that are not explained"
        yield RankedFinding.of(
            "unexplained", "warning", UNEXPLAINED, "these logs", what, moment=LAST
        )


def _refined(
    ranked: RankedFinding, faults: JobFaults, places: Collection[LinePlace], *, is_repeated: bool
) -> RankedFinding:
    finding = faults.context.refined(
        ranked.finding, places, work=faults.work, is_repeated=is_repeated
    )
    return replace(ranked, finding=finding)


def _as_missed(ranked: RankedFinding, expected_rdma: str) -> RankedFinding:
    what = f"{ranked.finding.what}; this job is meant to use InfiniBand ({expected_rdma})"
    return replace(ranked, finding=replace(ranked.finding, level="problem", what=what))


def _message_finding(
    fault: LoggedFault, where: str, work: str, kinds: Set[str], failures: Set[str]
) -> RankedFinding:
    """`kinds`: of all faults; `failures`: of those that do not only follow from others."""
    message = fault.message
    what = fault.what
    if message.shows_work and work:
        what = f"{what}; the last work in the log: {work}"
    level = message.level
    precedence = cast(Precedence, message.role)
    if not kinds.isdisjoint(message.explains):
        level = "problem"
        # A failure that it does not explain is the likelier reason of what it explains.
        is_alone = failures <= {*message.explains}
        precedence = "explanation" if is_alone else "symptom"
    elif fault.is_info and precedence == "cause":
        # NCCL went on: what stopped the job is another line, if there is one.
        precedence = "explanation"
    return RankedFinding.of(precedence, level, message.kind, where, what, fault.fix, fault.moment)


def _plain_finding(fault: PlainFault, where: str) -> RankedFinding:
    likes = f" ({fault.num_like_it - 1} more like it)" if fault.num_like_it > 1 else ""
    if fault.is_exception:
        what = f"the program raised {fault.text}{likes}"
        return RankedFinding.of(
            "failure", "problem", "exception", where, what, EXCEPTION_FIRST, fault.moment
        )
    precedence: Precedence = "warned" if fault.is_warning else "unexplained"
    what = f"{fault.text}{likes}"
    return RankedFinding.of(precedence, "warning", UNEXPLAINED, where, what, moment=fault.moment)


def wait_findings(
    faults: JobFaults, *, ranks: set[int], links: Collection[str]
) -> Iterator[RankedFinding]:
    """Collectives that timed out. `ranks`: all that the logs show; `links`: the transports of ranks
    whose communicator was complete."""
    moment = faults.first_wait or START
    for wait in faults.waits.explanations(faults.ranks | ranks, faults.work):
        precedence: Precedence = "failure" if wait.is_cause else "symptom"
        ranked = RankedFinding(finding=wait.finding, precedence=precedence, moment=moment)
        yield _refined(ranked, faults, faults.wait_places, is_repeated=False)
        if wait.is_early and (explained := _silent_link(wait.finding.where, links, moment)):
            yield explained


def _silent_link(where: str, links: Collection[str], moment: LogMoment) -> RankedFinding | None:
    """The ranks were connected, and the first data never arrived."""
    if any(link.startswith("P2P") for link in links):
        path = BROKEN_P2P
        fix = NO_P2P
    elif any(link.startswith("NET") and "Socket" not in link for link in links):
        path = BROKEN_RDMA
        fix = NO_RDMA
    elif any(link.startswith("NET") for link in links):
        path = BROKEN_TCP
        fix = NO_DATA
    else:
        return None
    what = f"all ranks were connected, and the first collective never finished: {path}"
    return RankedFinding.of("failure", "problem", "silent link", where, what, fix, moment)


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
            yield _interface_finding(level, host, what, precedence)
    yield from _shared_network_findings(log, precedence if is_unreached else "condition")
    if is_unreached and len({_network_of(address) for _, address in addresses.values()}) > 1:
        names = [f"{host}: {' '.join(bootstrap)}" for host, bootstrap in addresses.items()]
        what = f"hosts chose interfaces in different networks: {join_names(names)}"
        yield _interface_finding("problem", "every host", what, precedence)


def _shared_network_findings(log: NcclLog, precedence: Precedence) -> Iterator[RankedFinding]:
    level: Level = "warning" if precedence == "condition" else "problem"
    for host, interfaces in log.routes.shared_networks().items():
        what = (
            f"{interfaces}: the kernel's routing decides which of them sends, whatever "
            "NCCL_SOCKET_IFNAME says"
        )
        yield RankedFinding.of(precedence, level, "shared network", host, what, OTHER_SUBNET)


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


def _interface_finding(
    level: Level, where: str, what: str, precedence: Precedence = "explanation"
) -> RankedFinding:
    return RankedFinding.of(precedence, level, "interface", where, what, OTHER_INTERFACE)


def _network_of(address: str) -> str:
    """Its first half: hosts of one cluster differ in the other one."""
    return ".".join(address.split(".")[:2])
