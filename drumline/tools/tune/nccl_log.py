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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
    r"via (?P<kind>NET|P2P|SHM|COLLNET)(?:/(?P<name>[^/]{1,40}))?(?:/(?P<device>\d{1,4})(?!\[))?(?P<rest>.{0,60})"
)
OF_GROUP = " of an unknown communicator"
OTHER_INTERFACE = "export NCCL_SOCKET_IFNAME with the interface that the other hosts reach: drumline tune --hosts A,B"
SAME_CARDS = "make the network cards and plugins of all hosts the same"
SAME_TORCH = "install the same torch on all hosts: drumline doctor --hosts A,B shows what differs"


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    """A message of NCCL, or of torch about it (`nccl_messages.toml`)."""

    kind: str  # a fixed name for programs
    pattern: str
    what: str
    fix: str
    level: Level = "problem"
    is_torch: bool = False


def _known_messages() -> tuple[tuple[KnownMessage, re.Pattern[str]], ...]:
    text = Path(__file__).with_name("nccl_messages.toml").read_text(encoding="utf-8")
    known = [KnownMessage(**entry) for entry in tomllib.loads(text)["message"]]
    return tuple((one, re.compile(one.pattern)) for one in known)


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
        return all(one.is_complete for one in self.communicators.values())

    @property
    def name(self) -> str:
        return (
            f"{self.host} (process {self.pid})"
            if self.rank is None
            else f"rank {self.rank} on {self.host}"
        )


@dataclass(frozen=True, order=True)
class LoggedLink:
    """How one rank sends to another."""

    transport: str  # `P2P/CUMEM`, `SHM/direct`, `NET/Socket`, `NET/IB/GDRDMA`
    device: str  # `eth0 10.0.0.1`, `mlx5_0 1/RoCE`; empty: none, or not logged
    source: int
    target: int
    num_channels: int
    is_global: bool  # whether these are ranks of the largest communicator; else of an unknown one


class NcclLog:
    """What the lines of one or several logs show."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self.versions: set[str] = set()
        self.num_lines = 0  # of NCCL
        self.is_partial = (
            False  # whether the middle of a long log was not read, or not all connections were kept
        )
        # By transport, device, ranks and the communicators that they may belong to (name and size).
        self._channels: dict[
            tuple[str, str, int, int, frozenset[tuple[str, int]]], set[tuple[str, str]]
        ] = {}
        self._faults: dict[tuple[int, str, str], tuple[LoggedProcess | None, str]] = {}

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        for line in self._lines(file):
            if b"NCCL" in line:
                text = line.decode(errors="replace").rstrip()
                places = [*PREFIX.finditer(text)]
                if version := VERSION.search(text):
                    if "+" in version[1]:  # torch's errors name it without `+cuda`
                        self.versions.add(version[1])
                    self.num_lines += not places
                self._read_foreign(text[: places[0].start()] if places else text, name)
                ends = [*(place.start() for place in places[1:]), len(text)]
                for place, end in zip(places, ends, strict=False):
                    self._read_message(place, text[place.end() : end])

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
        rest = bytearray()
        while part := pipe.read(PART_BYTES):
            rest += part
            if len(rest) > HALF_BYTES:
                self.is_partial = True
                del rest[:-HALF_BYTES]
        return _lines(io.BytesIO(rest), HALF_BYTES)

    def _read_foreign(self, text: str, name: str) -> None:
        """A line of torch."""
        for number, (message, pattern) in enumerate(MESSAGES):
            if message.is_torch and (found := pattern.search(text)):
                rank = OF_TORCH.search(text)
                where = f"rank {rank['rank']}" if rank else name
                self._add_fault(number, message.what.format(**found.groupdict()), where, None)

    def _read_message(self, place: re.Match[str], text: str) -> None:
        self.num_lines += 1
        process = self._process(place["host"], int(place["pid"]))
        if place["level"] == "WARN":
            self._read_warning(process, text)
        elif found := CHANNEL.match(text):
            self._read_channel(process, found)
        elif found := INIT.search(text):
            self._read_init(process, *found.groups())
        elif found := DEVICES.match(text):
            for number, device, more in DEVICE.findall(found[2].partition("; OOB")[0]):
                process.devices[f"{found[1]}/{number}"] = f"{device} {more}".strip()
        elif found := NETWORK.match(text):
            process.network = found[1].strip()
        elif found := NAMED.match(text):
            process.interface = found[1]
        elif found := MISSING_PLUGIN.match(text):
            process.missing_plugin = found[1]

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
        self, process: LoggedProcess, pointer: str, rank: str, size: str, more: str, state: str
    ) -> None:
        if int(size) >= process.world_size:
            process.rank = int(rank)
            process.world_size = int(size)
        known = process.communicators.get(pointer)
        if state == "START" or known is None:
            process.communicators.pop(pointer, None)
            known = LoggedCommunicator(
                name=_communicator_name(process, more), rank=int(rank), size=int(size)
            )
            if len(process.communicators) < MAX_COMMUNICATORS:
                process.communicators[pointer] = known
        known.is_complete = state == "COMPLETE"

    def _read_channel(self, process: LoggedProcess, found: re.Match[str]) -> None:
        channel, number, source, target = found.groups()[:4]
        kind, name, device, rest = (
            found[group] or "" for group in ("kind", "name", "device", "rest")
        )
        transport = f"{kind}/{name.split()[0]}" if name else kind
        if "GDRDMA" in rest:
            transport += "/GDRDMA"
        ranks = int(source), int(target)
        own = ranks[1] if found["way"] == "receive" else ranks[0]
        fits = [
            one
            for one in process.communicators.values()
            if one.rank == own and max(ranks) < one.size
        ]
        # Up to NCCL 2.21 it connects while it initializes, later at the first collective.
        fits = [one for one in fits if not one.is_complete] or fits
        of = frozenset((one.name, one.size) for one in fits)
        key = transport, process.devices.get(f"{name}/{device}", ""), *ranks, of
        if key in self._channels or len(self._channels) < MAX_KEPT:
            self._channels.setdefault(key, set()).add((channel, number or ""))
        else:
            self.is_partial = True

    def _read_warning(self, process: LoggedProcess, text: str) -> None:
        for number, (message, pattern) in enumerate(MESSAGES):
            if not message.is_torch and (found := pattern.search(text)):
                named = (
                    f": NCCL_SOCKET_IFNAME={process.interface} names none"
                    if process.interface
                    else ""
                )
                self._add_fault(
                    number, message.what.format(named=named, **found.groupdict()), "", process
                )
                return
        self._add_fault(len(MESSAGES), text[:MAX_TEXT], "", process)

    def _add_fault(self, number: int, what: str, where: str, process: LoggedProcess | None) -> None:
        key = number, what, f"{process.host}:{process.pid}" if process else where
        if len(self._faults) < MAX_KEPT:
            self._faults.setdefault(key, (process, where))

    # What they show

    @property
    def world_size(self) -> int:
        return max((one.world_size for one in self.processes.values()), default=0)

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
        world_size = self.world_size
        members: dict[
            str, dict[int, int]
        ] = {}  # of a communicator: the rank in the largest one, by its own
        for rank, process in self.ranks.items():
            for one in filter(lambda one: one.name, process.communicators.values()):
                members.setdefault(one.name, {})[one.rank] = rank
        best: dict[tuple[bool, str, int, int], tuple[str, int]] = {}
        for (transport, device, source, target, of), channels in self._channels.items():
            pairs = {
                (source, target)
                if size == world_size
                else _in_world(members.get(name), source, target)
                for name, size in of
            }
            pair = next(iter(pairs)) if len(pairs) == 1 else None
            key = (pair is not None, transport, *(pair or (source, target)))
            before, count = best.get(key, ("", 0))
            best[key] = before or device, max(len(channels), count)
        return sorted(
            LoggedLink(transport, device, source, target, num_channels=count, is_global=is_global)
            for (is_global, transport, source, target), (device, count) in best.items()
        )

    def findings(self) -> list[Finding]:
        """Causes first."""
        found = []
        for (number, what, _), (process, where) in sorted(
            self._faults.items(), key=lambda item: item[0]
        ):
            place = where if process is None else process.name
            if number < len(MESSAGES):
                message = MESSAGES[number][0]
                found.append(Finding(message.level, message.kind, place, what, message.fix))
            else:
                found.append(Finding("warning", "unknown", place, f"NCCL warns: {what}"))
        return [*found, *self._network_findings(), *self._progress_findings()]

    def _network_findings(self) -> Iterator[Finding]:
        ranks = self.ranks
        networks = {one.network for one in ranks.values() if one.network}
        for kind, values, fix in (
            ("version", self.versions, SAME_TORCH),
            ("network", networks, SAME_CARDS),
        ):
            if len(values) > 1:
                what = f"the {kind} of NCCL differs across ranks: {', '.join(sorted(values))}"
                yield Finding("problem", kind, "every host", what, fix)
        hosts = {one.host for one in ranks.values()}
        for link in self.links():
            ends = (
                (ranks.get(link.source), ranks.get(link.target)) if link.is_global else (None, None)
            )
            pair = f"ranks {link.source} and {link.target}{'' if link.is_global else OF_GROUP}"
            if link.device.startswith("lo ") and len(hosts) > 1:
                what = f"NCCL uses the loopback ({link.device}), which reaches no other host"
                yield Finding("problem", "interface", pair, what, OTHER_INTERFACE)
            elif (
                link.transport.startswith("NET")
                and ends[0]
                and ends[1]
                and ends[0].host == ends[1].host
            ):
                what = f"they are on one host ({ends[0].host}) and use the network: neither P2P nor shared memory"
                fix = "unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID; start containers with --ipc=host"
                yield Finding("warning", "transport", pair, what, fix)
        for one in self.processes.values():
            if one.missing_plugin and one.network == "Socket" and len(hosts) > 1:
                what = f"NCCL found neither InfiniBand nor a plugin ({one.missing_plugin}), and uses TCP"
                fix = "where there is EFA or InfiniBand: install its plugin or driver (drumline tune --hosts A,B)"
                yield Finding("note", "network", one.name, what, fix)

    def _progress_findings(self) -> Iterator[Finding]:
        """Ranks that never finished their initialization, and ranks without a log."""
        ranks = self.ranks
        if not self.is_partial:
            for one in (one for one in ranks.values() if not one.is_complete):
                what = "it began to initialize a communicator, and never finished"
                fix = "another rank did not join, or failed: read the messages above, and the logs of the other ranks"
                yield Finding("problem", "initialization", one.name, what, fix)
        missing = sorted(set(range(min(self.world_size, MAX_KEPT))) - ranks.keys())
        if missing:
            what = f"no log of {len(missing)} of {self.world_size} ranks, the first is rank {missing[0]}"
            yield Finding(
                "note",
                "logs",
                "every host",
                what,
                "export NCCL_DEBUG_FILE=nccl.%h.%p.log, and give all files",
            )


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


def _in_world(members: dict[int, int] | None, source: int, target: int) -> tuple[int, int] | None:
    """The ranks of two members of a communicator; None: the logs do not show them."""
    if not members or not {source, target} <= members.keys():
        return None
    return members[source], members[target]
