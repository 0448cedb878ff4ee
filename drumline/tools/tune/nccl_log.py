"""Reads logs of a job, with NCCL's debug lines (NCCL_DEBUG=INFO) or without: which ranks are where,
how each pair is connected, and what went wrong.

A log may have lines of many ranks and programs, lines that two processes wrote into each other, and
garbage; what does not match is skipped. Time is linear in the log's size, and memory is bounded.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from drumline.base.text import join_names
from drumline.tools.doctor.finding import Finding, Level
from drumline.tools.tune.job_faults import JobFaults, LogLine
from drumline.tools.tune.ranked_findings import (
    LAST,
    START,
    UNEXPLAINED,
    RankedFinding,
    fault_findings,
    in_order,
    wait_findings,
)

# Of a larger file or pipe only the beginning and the end are read: the connections, and the faults.
HALF_BYTES = 48 << 20
PART_BYTES = 1 << 20
MAX_LINE = 4096  # NCCL writes 1 kB at most
MAX_KEPT = 50_000
MAX_COMMUNICATORS = 100  # of a process
MAX_TEXT = 200
PREFIX = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?P<place>(?:\S{1,300} ){0,3}?)"
    r"NCCL (?P<level>INFO|WARN) "
)
COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S{0,20})")
INIT = re.compile(
    r"comm (\S{1,20}) rank (\d{1,7}) nranks (\d{1,7}) (.{0,300})Init (START|COMPLETE)"
)
# What identifies a communicator to all of its processes: the id that it was made with, or how it
# was split off.
ORIGIN = re.compile(
    r"commId (?P<id>0x(?!0+\b)\w{1,16})|parent (?P<parent>\S{1,20}) (?P<split>splitCount \d{1,9} color \d{1,10})"
)
DEVICES = re.compile(r"NET/(Socket|IB) : Using (.*)")
DEVICE = re.compile(r"\[(\d{1,4})\]([^\s:<>]{1,64})(?::([^\s<>]{1,64}))?")
NETWORK = re.compile(r"Using network (\S.{0,60})")
NAMED = re.compile(r"NCCL_SOCKET_IFNAME set (?:by environment )?to (\S{1,100})")
MISSING_PLUGIN = re.compile(
    r"NET/Plugin ?: (?:Could not find: ?|No plugin found \()(\S{1,100}?)[.,)]*(?:\s|$)"
)
CONNECTED = re.compile(r"Connected all (?:rings|trees)")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[0\])?([^\s:<>]{1,64}):([^\s<>]{1,64})<")
CHANNEL = re.compile(
    r"Channel (\d{1,4})(?:/(\d{1,4}))? : (\d{1,7})\[\w{1,16}\] -> (\d{1,7})\[\w{1,16}\](?: \[(?P<way>send|receive)\])? "
    r"via (?P<kind>NET|P2P|SHM|COLLNET)(?:/(?P<name>[^/]{1,40}))?(?:/(?P<device>\d{1,4})(?!\[))?(?P<options>.{0,60})"
)
EC2_HOST = re.compile(r"ip-\d+-\d+-\d+-\d+\b")
OF_GROUP = " of an unknown communicator"
OTHER_INTERFACE = "export NCCL_SOCKET_IFNAME with the interface that the other hosts reach: drumline tune --hosts A,B"
SAME_CARDS = (
    "make InfiniBand and the plugins work on all hosts, or on none: NCCL_IB_DISABLE=1 or "
    "NCCL_NET=Socket everywhere"
)
GPU_DIRECT = (
    "modprobe nvidia-peermem on every host, or a kernel and driver with DMA-BUF; nvidia-smi topo "
    "-m (NCCL_NET_GDR_LEVEL)"
)
# Kinds of faults of connections that were not made.
UNREACHED = (
    "timeout", "route", "refused", "loopback", "container bridge", "socket", "store", "collective timeout",
)  # fmt: skip
BRIDGES = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "cilium", "tun", "tailscale", "zt", "wg", "lxc", "kube",
)  # fmt: skip
LINK_LOCAL = ("169.254.", "fe80")
SAME_TORCH = "install the same torch on all hosts: drumline doctor --hosts A,B shows what differs"


@dataclass(kw_only=True)
class LoggedCommunicator:
    """One communicator, as one of its processes logs it."""

    name: str  # the same in all of its processes; empty: not known
    rank: int
    size: int
    is_complete: bool = False


@dataclass(kw_only=True)
class LoggedProcess:
    """One process, as its lines show it. Ranks are those of its largest communicator."""

    host: str
    pid: int
    rank: int | None = None
    world_size: int = 0
    network: str = ""
    interface: str = ""  # the value of NCCL_SOCKET_IFNAME
    bootstrap: tuple[str, str] = ("", "")  # interface and address by which ranks meet
    missing_plugin: str = ""
    devices: dict[str, str] = field(default_factory=dict)  # by `Socket/0`: `eth0 10.0.0.1`
    communicators: dict[str, LoggedCommunicator] = field(default_factory=dict)  # by pointer
    is_connected: bool = False  # at least one communicator

    @property
    def is_complete(self) -> bool:
        return self.is_connected or all(
            communicator.is_complete for communicator in self.communicators.values()
        )

    @property
    def name(self) -> str:
        if self.rank is None:
            return f"{self.host} (process {self.pid})"
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, order=True)
class LoggedLink:
    """How one rank sends to another."""

    transport: str  # `P2P/CUMEM`, `SHM/direct`, `NET/Socket`, `NET/IB/GDRDMA`
    device: str  # `eth0 10.0.0.1`, `mlx5_0 1/RoCE`; empty: none, or not logged
    source: int
    target: int
    num_channels: int
    is_global: bool  # whether these are ranks of the largest communicator; else of an unknown one


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """The channels by which one rank sends to another."""

    transport: str
    device: str
    source: int
    target: int
    communicators: frozenset[tuple[str, int]]
    """Name and size of those that the ranks may belong to."""


class NcclLog:
    """What the lines of one or several logs show."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self.versions: set[str] = set()
        self.num_lines = 0  # of NCCL
        # Whether the middle of a long log was not read, or not all connections were kept.
        self.is_partial = False
        self._channels: dict[ChannelGroup, set[tuple[str, str]]] = {}
        self.faults = JobFaults()
        self._processes_by_origin: dict[str, LoggedProcess] = {}

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        self.faults.begin_file()
        for line in self._lines(file):
            text = line.decode(errors="replace")
            if "\x1b" in text:
                text = COLOURS.sub("", text)
            # A progress bar overwrites its line.
            for part in text.split("\r"):
                self._read_line(part.rstrip(), name)

    def _read_line(self, line: str, name: str) -> None:
        """A line of torch or another program, or the messages of one or several processes."""
        if "NCCL" not in line:
            if line:
                self.faults.read(LogLine(text=line, file=name))
            return
        prefixes = [*PREFIX.finditer(line)]
        if version := VERSION.search(line):
            if "+" in version[1]:  # torch's errors name it without `+cuda`
                self.versions.add(version[1])
            self.num_lines += not prefixes
        starts = [*(prefix.start() for prefix in prefixes), len(line)]
        if foreign := line[: starts[0]].strip():
            self.faults.read(LogLine(text=foreign, file=name))
        for prefix, end in zip(prefixes, starts[1:], strict=True):
            self._read_message(prefix, line[prefix.end() : end])

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Those of the beginning and the end."""
        yield from _lines(file, HALF_BYTES)
        if not file.seekable():
            yield from self._last_lines(file)
            return
        begin = file.tell()
        end = file.seek(0, os.SEEK_END)
        self.is_partial |= end - begin > HALF_BYTES
        file.seek(max(begin, end - HALF_BYTES))
        yield from _lines(file, HALF_BYTES)

    def _last_lines(self, pipe: BinaryIO) -> Iterable[bytes]:
        """A pipe is read to its end, or the program that writes would be stopped."""
        tail = bytearray()
        while part := pipe.read(PART_BYTES):
            tail += part
            if len(tail) > HALF_BYTES:
                self.is_partial = True
                del tail[:-HALF_BYTES]
        return _lines(io.BytesIO(tail), HALF_BYTES)

    def _read_message(self, prefix: re.Match[str], text: str) -> None:
        self.num_lines += 1
        process = self._process(prefix["host"], int(prefix["pid"]))
        if prefix["level"] == "WARN":
            self._read_warning(process, prefix["place"], text)
        elif match := CHANNEL.match(text):
            self._read_channel(process, match)
        elif match := INIT.search(text):
            self._read_init(process, *match.groups())
        elif match := DEVICES.match(text):
            for number, device, details in DEVICE.findall(match[2].partition("; OOB")[0]):
                process.devices[f"{match[1]}/{number}"] = f"{device} {details}".strip()
        else:
            self._read_setting(process, text)

    def _read_setting(self, process: LoggedProcess, text: str) -> None:
        """What a process chose or was given, and conditions that may explain a fault."""
        if match := NETWORK.match(text):
            process.network = match[1].strip()
        elif match := NAMED.match(text):
            process.interface = match[1]
        elif match := BOOTSTRAP.match(text):
            process.bootstrap = (match[1], match[2])
        elif match := MISSING_PLUGIN.match(text):
            process.missing_plugin = match[1]
        elif CONNECTED.match(text):
            process.is_connected = True
        else:
            self.faults.read(LogLine(text=text, origin=self._origin(process), is_info=True))

    def _origin(self, process: LoggedProcess) -> str:
        origin = f"{process.host}:{process.pid}"
        if len(self._processes_by_origin) < MAX_KEPT:
            self._processes_by_origin[origin] = process
        return origin

    def _process(self, host: str, pid: int) -> LoggedProcess:
        process = self.processes.get((host, pid))
        if process is None:
            process = self._process_with_longer_name(host, pid) or LoggedProcess(host=host, pid=pid)
            if len(self.processes) < MAX_KEPT:
                self.processes[host, pid] = process
        return process

    def _process_with_longer_name(self, name: str, pid: int) -> LoggedProcess | None:
        """Two processes that write into one line put the end of one before the other's host
        name."""
        for start in range(1, len(name)):
            process = self.processes.get((name[start:], pid))
            if process is not None:
                return process
        return None

    def _read_init(
        self, process: LoggedProcess, pointer: str, rank: str, size: str, details: str, state: str
    ) -> None:
        if int(size) >= process.world_size:
            process.rank = int(rank)
            process.world_size = int(size)
        communicator = process.communicators.get(pointer)
        if state == "START" or communicator is None:
            process.communicators.pop(pointer, None)
            communicator = LoggedCommunicator(
                name=_communicator_name(process, details), rank=int(rank), size=int(size)
            )
            if len(process.communicators) < MAX_COMMUNICATORS:
                process.communicators[pointer] = communicator
        communicator.is_complete = state == "COMPLETE"

    def _read_channel(self, process: LoggedProcess, match: re.Match[str]) -> None:
        channel, number, source, target = match.groups()[:4]
        name = match["name"] or ""
        transport = f"{match['kind']}/{name.split()[0]}" if name else match["kind"]
        if "GDRDMA" in match["options"]:
            transport += "/GDRDMA"
        this_rank = target if match["way"] == "receive" else source
        candidates = _possible_communicators(process, int(this_rank), max(int(source), int(target)))
        group = ChannelGroup(
            transport,
            process.devices.get(f"{name}/{match['device'] or ''}", ""),
            int(source),
            int(target),
            frozenset((communicator.name, communicator.size) for communicator in candidates),
        )
        if group in self._channels or len(self._channels) < MAX_KEPT:
            self._channels.setdefault(group, set()).add((channel, number or ""))
        else:
            self.is_partial = True

    def _read_warning(self, process: LoggedProcess, place: str, text: str) -> None:
        named = f": NCCL_SOCKET_IFNAME={process.interface} names none" if process.interface else ""
        self.faults.read(
            LogLine(
                text=text,
                place=f"{place}NCCL WARN ",
                origin=self._origin(process),
                is_warning=True,
                named=named,
            )
        )

    # What they show

    @property
    def world_size(self) -> int:
        return max((process.world_size for process in self.processes.values()), default=0)

    @property
    def ranks(self) -> dict[int, LoggedProcess]:
        """The processes of the largest communicators, by rank."""
        world_size = self.world_size
        by_rank = {
            process.rank: process
            for process in self.processes.values()
            if process.rank is not None and process.world_size == world_size
        }
        return dict(sorted(by_rank.items()))

    def links(self) -> list[LoggedLink]:
        """One for each pair; where both ends were logged, the end that has a device."""
        members = self._members()
        world_size = self.world_size
        links: dict[tuple[bool, str, int, int], LoggedLink] = {}
        for group, channels in self._channels.items():
            pair = _global_pair(group, members, world_size)
            source, target = pair or (group.source, group.target)
            link = LoggedLink(
                group.transport, group.device, source, target, len(channels), pair is not None
            )
            key = (link.is_global, link.transport, source, target)
            before = links.get(key, link)
            links[key] = replace(
                link,
                device=before.device or link.device,
                num_channels=max(before.num_channels, link.num_channels),
            )
        return sorted(links.values())

    def _members(self) -> dict[str, dict[int, int]]:
        """By name of a communicator and rank in it: the rank in the largest one."""
        members: dict[str, dict[int, int]] = {}
        for rank, process in self.ranks.items():
            for communicator in process.communicators.values():
                if communicator.name:
                    members.setdefault(communicator.name, {})[communicator.rank] = rank
        return members

    def findings(self) -> list[Finding]:
        """Problems first, and causes before what follows from them."""
        links = self.links()
        return in_order(
            [
                *self._differences(),
                *fault_findings(
                    self.faults, name_of=self._name_of, transports=self._transports_between(links)
                ),
                *wait_findings(
                    self.faults, ranks=set(self.ranks), links=self._connected_transports(links)
                ),
                *self._interface_findings(),
                *self._link_findings(links),
                *self._progress_findings(),
            ]
        )

    def _name_of(self, origin: str) -> str:
        process = self._processes_by_origin.get(origin)
        return origin if process is None else process.name

    def _is_inside(self, link: LoggedLink, hosts: Mapping[int, str]) -> bool:
        """Whether both ranks are known to be on one host."""
        host = hosts.get(link.source) if link.is_global else None
        return host is not None and host == hosts.get(link.target)

    def _transports_between(self, links: Iterable[LoggedLink]) -> set[str]:
        hosts = {rank: process.host for rank, process in self.ranks.items()}
        return {link.transport for link in links if not self._is_inside(link, hosts)}

    def _connected_transports(self, links: Iterable[LoggedLink]) -> set[str]:
        """Those of a job whose communicators are complete."""
        processes = self.ranks.values()
        if not processes or not all(process.is_complete for process in processes):
            return set()
        return {link.transport for link in links}

    def _differences(self) -> Iterator[RankedFinding]:
        if len(self.versions) > 1:
            what = f"the version of NCCL differs across ranks: {', '.join(sorted(self.versions))}"
            finding = Finding("problem", "version", "every host", what, SAME_TORCH)
            yield RankedFinding(finding=finding, place="cause")
        networks = {process.network for process in self.processes.values() if process.network}
        if len(networks) > 1:
            what = (
                f"the network of NCCL differs across ranks: {', '.join(sorted(networks))}; "
                "InfiniBand or a plugin works on some hosts only, and different networks do not "
                "connect"
            )
            finding = Finding("problem", "network", "every host", what, SAME_CARDS)
            yield RankedFinding(finding=finding, place="explanation")

    def _interface_findings(self) -> Iterator[RankedFinding]:
        """Interfaces by which the ranks of several hosts cannot meet."""
        addresses = {
            process.host: process.bootstrap
            for process in self.processes.values()
            if process.bootstrap[0]
        }
        is_unreached = not self.faults.kinds().isdisjoint(UNREACHED)
        for host, (interface, address) in addresses.items():
            is_loopback = interface == "lo" or address.startswith("127.")
            if len(addresses) > 1 and is_loopback:
                what = (
                    f"NCCL uses the loopback ({interface} {address}), which reaches no other host"
                )
                yield _interface_finding("problem", host, what)
            elif (interface.startswith(BRIDGES) or address.startswith(LINK_LOCAL)) and (
                len(addresses) > 1 or is_unreached
            ):
                what = (
                    f"NCCL uses {interface} ({address}), a bridge of containers, a tunnel or a "
                    "link of this board, which most often reaches no other host"
                )
                yield _interface_finding("problem" if is_unreached else "warning", host, what)
        if is_unreached and len({_network_of(address) for _, address in addresses.values()}) > 1:
            names = [f"{host}: {' '.join(bootstrap)}" for host, bootstrap in addresses.items()]
            what = f"hosts chose interfaces in different networks: {join_names(names)}"
            yield _interface_finding("problem", "every host", what)

    def _link_findings(self, links: Iterable[LoggedLink]) -> Iterator[RankedFinding]:
        """Links over the wrong interface, and networks that are used where there is better."""
        hosts = {rank: process.host for rank, process in self.ranks.items()}
        is_one_host = len(set(hosts.values())) <= 1
        for link in links:
            pair = f"ranks {link.source} and {link.target}{'' if link.is_global else OF_GROUP}"
            if link.device.startswith("lo ") and not is_one_host:
                what = f"NCCL uses the loopback ({link.device}), which reaches no other host"
                yield _interface_finding("problem", pair, what)
            elif link.transport.startswith("NET") and self._is_inside(link, hosts):
                what = f"they are on one host ({hosts[link.source]}) and use the network: neither P2P nor shared memory"
                fix = "unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID; start containers with --ipc=host"
                finding = Finding("warning", "transport", pair, what, fix)
                yield RankedFinding(finding=finding, place="condition")
        transports = self._transports_between(links)
        yield from _without_gpu_direct(transports)
        if "NET/Socket" in transports:
            yield from self._missing_plugins()

    def _missing_plugins(self) -> Iterator[RankedFinding]:
        for process in self.processes.values():
            if process.missing_plugin and process.network == "Socket":
                what = f"NCCL found neither InfiniBand nor a plugin ({process.missing_plugin}), and uses TCP"
                fix = "where there is EFA or InfiniBand: install its plugin or driver (drumline tune --hosts A,B)"
                finding = Finding("note", "network", process.name, what, fix)
                # On AWS the plugin is what is missing; elsewhere more likely InfiniBand.
                moment = START if EC2_HOST.match(process.host) else LAST
                yield RankedFinding(finding=finding, place="condition", moment=moment)

    def _progress_findings(self) -> Iterator[RankedFinding]:
        """Ranks that never finished their initialization, and ranks without a log."""
        ranks = self.ranks
        if not self.is_partial:
            what = "it began to initialize a communicator, and never finished"
            fix = "another rank did not join, or failed: read the messages above, and the logs of the other ranks"
            for process in ranks.values():
                if not process.is_complete:
                    finding = Finding("problem", "initialization", process.name, what, fix)
                    yield RankedFinding(finding=finding, place="symptom", moment=LAST)
        missing = sorted(set(range(min(self.world_size, MAX_KEPT))) - ranks.keys())
        if missing:
            what = f"no log of {len(missing)} of {self.world_size} ranks, the first is rank {missing[0]}"
            fix = "export NCCL_DEBUG_FILE=nccl.%h.%p.log, and give all files"
            finding = Finding("note", "logs", "every host", what, fix)
            yield RankedFinding(finding=finding, place="unexplained", moment=LAST)


def has_trouble(findings: Iterable[Finding]) -> bool:
    """Whether a log shows a problem, or a line that may be one and is not explained."""
    return any(finding.level == "problem" or finding.check == UNEXPLAINED for finding in findings)


def _without_gpu_direct(transports: set[str]) -> Iterator[RankedFinding]:
    rdma = {name for name in transports if name.startswith("NET/IB")}
    if rdma and not any(name.endswith("/GDRDMA") for name in rdma):
        what = (
            "ranks of different hosts use InfiniBand without GPUDirect RDMA (no GDRDMA in their "
            "connections): data goes through host memory"
        )
        finding = Finding("warning", "GPUDirect RDMA off", "every host", what, GPU_DIRECT)
        yield RankedFinding(finding=finding, place="condition", moment=LAST)


def _interface_finding(level: Level, where: str, what: str) -> RankedFinding:
    finding = Finding(level, "interface", where, what, OTHER_INTERFACE)
    return RankedFinding(finding=finding, place="explanation")


def _network_of(address: str) -> str:
    """Its first half: hosts of one cluster differ in the other one."""
    return ".".join(address.split(".")[:2])


def _lines(file: BinaryIO, most: int) -> Iterable[bytes]:
    """Lines, or parts of lines without an end, of the next `most` bytes."""
    while most > 0 and (line := file.readline(min(MAX_LINE, most))):
        most -= len(line)
        yield line


def _communicator_name(process: LoggedProcess, text: str) -> str:
    origin = ORIGIN.search(text)
    if origin is None:
        return ""
    parent = process.communicators.get(origin["parent"] or "")
    split = f"{parent.name} {origin['split']}" if parent and parent.name else ""
    return origin["id"] or split[:MAX_TEXT]


def _possible_communicators(
    process: LoggedProcess, rank: int, largest_rank: int
) -> list[LoggedCommunicator]:
    """Those that a channel of this rank of the process may belong to."""
    candidates = [
        communicator
        for communicator in process.communicators.values()
        if communicator.rank == rank and largest_rank < communicator.size
    ]
    # Up to NCCL 2.21 it connects while it initializes, later at the first collective.
    initializing = [communicator for communicator in candidates if not communicator.is_complete]
    return initializing or candidates


def _global_pair(
    group: ChannelGroup, members: Mapping[str, Mapping[int, int]], world_size: int
) -> tuple[int, int] | None:
    """The two ranks in the largest communicator; None: the logs do not show them."""
    pairs: set[tuple[int, int] | None] = set()
    for name, size in group.communicators:
        ranks = members.get(name, {})
        if size == world_size:
            pairs.add((group.source, group.target))
        elif group.source in ranks and group.target in ranks:
            pairs.add((ranks[group.source], ranks[group.target]))
        else:
            pairs.add(None)
    return pairs.pop() if len(pairs) == 1 else None
