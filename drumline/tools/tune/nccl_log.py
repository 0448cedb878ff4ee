"""Reads NCCL's debug logs (NCCL_DEBUG=INFO): which ranks are where, how each pair is connected, and
what went wrong.

A log may have lines of many ranks and programs, lines that two processes wrote into each other, and
garbage; what does not match is skipped. Time and memory are bounded.
"""

from __future__ import annotations

import io
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from drumline.tools.doctor.finding import Finding, Level

# Of a larger file or pipe only the beginning and the end are read: the connections, and the faults.
HALF_BYTES = 48 << 20
PART_BYTES = 1 << 20
MAX_LINE = 4096  # NCCL writes 1 kB at most
MAX_KEPT = 50_000
MAX_COMMUNICATORS = 100  # of a process
MAX_TEXT = 200
PREFIX = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?:\S{1,300} ){0,3}?"
    r"NCCL (?P<level>INFO|WARN) "
)
OF_TORCH = re.compile(r"\[rank(?P<rank>\d{1,7})\]:?")
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
MISSING_PLUGIN = re.compile(r"NET/Plugin: Could not find: ?(\S{1,100}?)[.,]?(?:\s|$)")
CHANNEL = re.compile(
    r"Channel (\d{1,4})(?:/(\d{1,4}))? : (\d{1,7})\[\w{1,16}\] -> (\d{1,7})\[\w{1,16}\](?: \[(?P<way>send|receive)\])? "
    r"via (?P<kind>NET|P2P|SHM|COLLNET)(?:/(?P<name>[^/]{1,40}))?(?:/(?P<device>\d{1,4})(?!\[))?(?P<options>.{0,60})"
)
OF_GROUP = " of an unknown communicator"
OTHER_INTERFACE = "export NCCL_SOCKET_IFNAME with the interface that the other hosts reach: drumline tune --hosts A,B"
SAME_CARDS = "make the network cards and plugins of all hosts the same"
SAME_TORCH = "install the same torch on all hosts: drumline doctor --hosts A,B shows what differs"


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    """A message of NCCL, or of torch about it (`nccl_messages.toml`)."""

    kind: str  # a fixed name for programs
    pattern: re.Pattern[str]
    what: str
    fix: str
    level: Level = "problem"
    is_torch: bool = False


def _known_messages() -> tuple[KnownMessage, ...]:
    document = Path(__file__).with_name("nccl_messages.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(document)["message"]
    return tuple(
        KnownMessage(**{**entry, "pattern": re.compile(entry["pattern"])}) for entry in entries
    )


MESSAGES = _known_messages()


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
    missing_plugin: str = ""
    devices: dict[str, str] = field(default_factory=dict)  # by `Socket/0`: `eth0 10.0.0.1`
    communicators: dict[str, LoggedCommunicator] = field(default_factory=dict)  # by pointer

    @property
    def is_complete(self) -> bool:
        return all(communicator.is_complete for communicator in self.communicators.values())

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


@dataclass(frozen=True, slots=True)
class LoggedFault:
    number: int
    """Its position in MESSAGES; their number: no known message."""
    what: str
    process: LoggedProcess | None
    where: str
    """Of a line that names no process."""


class NcclLog:
    """What the lines of one or several logs show."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self.versions: set[str] = set()
        self.num_lines = 0  # of NCCL
        # Whether the middle of a long log was not read, or not all connections were kept.
        self.is_partial = False
        self._channels: dict[ChannelGroup, set[tuple[str, str]]] = {}
        # By number, text and process or place: causes come first in this order.
        self._faults: dict[tuple[int, str, str], LoggedFault] = {}

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        for line in self._lines(file):
            if b"NCCL" in line:
                self._read_line(line.decode(errors="replace").rstrip(), name)

    def _read_line(self, line: str, name: str) -> None:
        """A line of torch, or the messages of one or several processes."""
        prefixes = [*PREFIX.finditer(line)]
        if version := VERSION.search(line):
            if "+" in version[1]:  # torch's errors name it without `+cuda`
                self.versions.add(version[1])
            self.num_lines += not prefixes
        starts = [*(prefix.start() for prefix in prefixes), len(line)]
        self._read_foreign(line[: starts[0]], name)
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

    def _read_foreign(self, text: str, name: str) -> None:
        """A line of torch."""
        for number, message in enumerate(MESSAGES):
            match = message.pattern.search(text) if message.is_torch else None
            if match is not None:
                rank = OF_TORCH.search(text)
                where = f"rank {rank['rank']}" if rank else name
                what = message.what.format(**match.groupdict())
                self._add_fault(LoggedFault(number, what, None, where))

    def _read_message(self, prefix: re.Match[str], text: str) -> None:
        self.num_lines += 1
        process = self._process(prefix["host"], int(prefix["pid"]))
        if prefix["level"] == "WARN":
            self._read_warning(process, text)
        elif match := CHANNEL.match(text):
            self._read_channel(process, match)
        elif match := INIT.search(text):
            self._read_init(process, *match.groups())
        elif match := DEVICES.match(text):
            for number, device, details in DEVICE.findall(match[2].partition("; OOB")[0]):
                process.devices[f"{match[1]}/{number}"] = f"{device} {details}".strip()
        elif match := NETWORK.match(text):
            process.network = match[1].strip()
        elif match := NAMED.match(text):
            process.interface = match[1]
        elif match := MISSING_PLUGIN.match(text):
            process.missing_plugin = match[1]

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

    def _read_warning(self, process: LoggedProcess, text: str) -> None:
        for number, message in enumerate(MESSAGES):
            match = None if message.is_torch else message.pattern.search(text)
            if match is not None:
                named = ""
                if process.interface:
                    named = f": NCCL_SOCKET_IFNAME={process.interface} names none"
                what = message.what.format(named=named, **match.groupdict())
                self._add_fault(LoggedFault(number, what, process, ""))
                return
        self._add_fault(LoggedFault(len(MESSAGES), text[:MAX_TEXT], process, ""))

    def _add_fault(self, fault: LoggedFault) -> None:
        process = fault.process
        origin = fault.where if process is None else f"{process.host}:{process.pid}"
        if len(self._faults) < MAX_KEPT:
            self._faults.setdefault((fault.number, fault.what, origin), fault)

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
        """Causes first."""
        faults = [fault for _, fault in sorted(self._faults.items(), key=lambda item: item[0])]
        return [
            *map(_fault_finding, faults),
            *self._network_findings(),
            *self._link_findings(),
            *self._progress_findings(),
        ]

    def _network_findings(self) -> Iterator[Finding]:
        ranks = self.ranks
        networks = {process.network for process in ranks.values() if process.network}
        for kind, values, fix in (
            ("version", self.versions, SAME_TORCH),
            ("network", networks, SAME_CARDS),
        ):
            if len(values) > 1:
                what = f"the {kind} of NCCL differs across ranks: {', '.join(sorted(values))}"
                yield Finding("problem", kind, "every host", what, fix)

    def _link_findings(self) -> Iterator[Finding]:
        """Links over the wrong interface, and networks that are used where there is better."""
        hosts = {rank: process.host for rank, process in self.ranks.items()}
        is_one_host = len(set(hosts.values())) <= 1
        for link in self.links():
            pair = f"ranks {link.source} and {link.target}{'' if link.is_global else OF_GROUP}"
            host = hosts.get(link.source) if link.is_global else None
            is_inside = host is not None and host == hosts.get(link.target)
            if link.device.startswith("lo ") and not is_one_host:
                what = f"NCCL uses the loopback ({link.device}), which reaches no other host"
                yield Finding("problem", "interface", pair, what, OTHER_INTERFACE)
            elif link.transport.startswith("NET") and is_inside:
                what = f"they are on one host ({host}) and use the network: neither P2P nor shared memory"
                fix = "unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID; start containers with --ipc=host"
                yield Finding("warning", "transport", pair, what, fix)
        if is_one_host:
            return
        for process in self.processes.values():
            if process.missing_plugin and process.network == "Socket":
                what = f"NCCL found neither InfiniBand nor a plugin ({process.missing_plugin}), and uses TCP"
                fix = "where there is EFA or InfiniBand: install its plugin or driver (drumline tune --hosts A,B)"
                yield Finding("note", "network", process.name, what, fix)

    def _progress_findings(self) -> Iterator[Finding]:
        """Ranks that never finished their initialization, and ranks without a log."""
        ranks = self.ranks
        if not self.is_partial:
            what = "it began to initialize a communicator, and never finished"
            fix = "another rank did not join, or failed: read the messages above, and the logs of the other ranks"
            for process in ranks.values():
                if not process.is_complete:
                    yield Finding("problem", "initialization", process.name, what, fix)
        missing = sorted(set(range(min(self.world_size, MAX_KEPT))) - ranks.keys())
        if missing:
            what = f"no log of {len(missing)} of {self.world_size} ranks, the first is rank {missing[0]}"
            fix = "export NCCL_DEBUG_FILE=nccl.%h.%p.log, and give all files"
            yield Finding("note", "logs", "every host", what, fix)


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


def _fault_finding(fault: LoggedFault) -> Finding:
    where = fault.where if fault.process is None else fault.process.name
    if fault.number == len(MESSAGES):
        return Finding("warning", "unknown", where, f"NCCL warns: {fault.what}")
    message = MESSAGES[fault.number]
    return Finding(message.level, message.kind, where, fault.what, message.fix)
