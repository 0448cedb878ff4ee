"""Reads logs of a job, with NCCL's debug lines (NCCL_DEBUG=INFO) or without: which ranks are where,
how each pair is connected, and what went wrong.

A log may have lines of many ranks and programs, lines that two processes wrote into each other, and
garbage; what does not match is skipped. Time is linear in the log's size, and memory is bounded.
"""

from __future__ import annotations

import io
import ipaddress
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import BinaryIO

from drumline.tools.tune.job_faults import JobFaults, LogLine
from drumline.tools.tune.known_messages import LinePlace
from drumline.tools.tune.logged_links import CHANNEL, INIT, LoggedLink, LoggedLinks, LoggedProcess

MAX_NETWORKS = 1_000
SUBNET = r"(?P<network>\d{1,3}(?:\.\d{1,3}){3}/\d{1,2})"
LINK_ROUTE = re.compile(SUBNET + r" dev (?P<interface>[\w.@-]{1,32})\b.{0,60}scope link")
ADDRESS = re.compile(
    r"\binet " + SUBNET + r"\b.{0,80} scope global .{0,60}?(?P<interface>[\w.-]{1,32})$"
)


class LoggedRoutes:
    """Networks of the interfaces of hosts, as the output of `ip route` and `ip address` in a log
    shows them."""

    def __init__(self) -> None:
        self._networks: dict[tuple[str, str], ipaddress.IPv4Network] = {}

    def read(self, text: str, name: str) -> None:
        """`name`: of the file, for lines before which no launcher wrote a host."""
        if " scope " not in text:
            return
        match = LINK_ROUTE.search(text) or ADDRESS.search(text)
        if match is None or len(self._networks) >= MAX_NETWORKS:
            return
        host = text[: match.start()].strip(" []():|") or name
        try:
            network = ipaddress.IPv4Network(match["network"], strict=False)
        except ValueError:
            return
        self._networks[host, match["interface"]] = network

    def shared_networks(self) -> dict[str, str]:
        """Two interfaces of a host whose networks overlap, in words; the first of each host."""
        shared: dict[str, str] = {}
        for first, second in combinations(self._networks.items(), 2):
            (host, interface), network = first
            (other_host, other_interface), other_network = second
            if host == other_host and network.overlaps(other_network):
                words = f"{interface} and {other_interface} are in the same network ({network})"
                shared.setdefault(host, words)
        return shared


# Of a larger file or pipe only the beginning and the end are read: the connections, and the faults.
HALF_BYTES = 48 << 20
PART_BYTES = 1 << 20
MAX_LINE = 4096  # NCCL writes 1 kB at most


class BoundedLines:
    """The lines of a file or a pipe; of a long one only those of the beginning and the end, so that
    memory is bounded."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.is_partial = False  # whether the middle was not read

    def __iter__(self) -> Iterator[bytes]:
        yield from _lines(self._file)
        # It is read to its end, or the program that writes into a pipe would be stopped.
        tail = bytearray()
        while part := self._file.read(PART_BYTES):
            tail += part
            if len(tail) > HALF_BYTES:
                self.is_partial = True
                del tail[:-HALF_BYTES]
        yield from _lines(io.BytesIO(tail))


def _lines(file: BinaryIO) -> Iterable[bytes]:
    """Lines, or parts of lines without an end, of the next bytes."""
    left = HALF_BYTES
    while left > 0 and (line := file.readline(min(MAX_LINE, left))):
        left -= len(line)
        yield line


PREFIX = re.compile(
    r"(?<![\w.-])(?!\d\d:\d\d:\d\d )(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] "
    r"(?P<source>(?:\S{1,300} ){0,3}?)NCCL (?P<level>INFO|WARN) "
)
# Launchers and people cut the beginning of a line, or all of it.
CUT_PREFIX = re.compile(r"NCCL (?P<level>INFO|WARN) ")
COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S{0,20})")
ERROR_VERSION = re.compile(r"2\.\d+\.\d+")  # of torch's errors; older ones print 2.12.12 as 21.2.12
DEVICES = re.compile(r"NET/(Socket|IB) : Using (.*)")
DEVICE = re.compile(r"\[(\d{1,4})\]([^\s:<>]{1,64})(?::([^\s<>]{1,64}))?")
NETWORK = re.compile(r"Using network (\S.{0,60})|Assigned NET plugin (\S.{0,60}?) to comm")
INTERFACE = re.compile(r"NCCL_SOCKET_IFNAME(?:=| set (?:by environment )?to )(\S{1,100})")
MISSING_PLUGIN = re.compile(
    r"NET/Plugin ?: (?:Could not find: ?|No plugin found \()(\S{1,100}?)[.,)]*(?:\s|$)"
)
# What shows that a job is meant to use InfiniBand or RoCE.
RDMA_SETTING = re.compile(
    r"NCCL_IB_(?:HCA|GID_INDEX|TC|SL|QPS_PER_CONNECTION)(?:=| set (?:by environment )?to )[\"']?[\w^=]\S{0,80}"
    r"|NCCL_IB_DISABLE(?:=| set (?:by environment )?to )[\"']?0\b|NCCL_NET(?:=| set (?:by environment )?to )[\"']?IB\b"
    r"|/dev/infiniband\b|\bmlx[45]_(?:bond_)?\d+\b|\brdma/[\w-]{1,60}[\"']?: *[\"']?[1-9]"
    r"|(?:Bootstrap ?: Using (?:\[0\])?|\[\d\])ib[ps\d]\w*"
)
CONNECTED = re.compile(r"Connected all (?:rings|trees)")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[0\])?([^\s:<>]{1,64}):([^\s<>]{1,64})<")


class NcclLog:
    """What the lines of one or several logs show."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self.versions: set[str] = set()
        self.versions_of_errors: set[str] = set()
        self.num_lines = 0  # of NCCL
        self._is_cut = False  # whether the middle of a long log was not read
        self.faults = JobFaults()
        self.rdma_setting = ""  # what shows that the job is meant to use InfiniBand
        self.routes = LoggedRoutes()
        self._file = ""  # that is read
        self._interface = ""  # the last value of NCCL_SOCKET_IFNAME
        self._links = LoggedLinks()
        self._processes_by_origin: dict[str, LoggedProcess] = {}

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        self.faults.begin_file()
        self._file = name
        lines = BoundedLines(file)
        for line in lines:
            text = line.decode(errors="replace")
            if "\x1b" in text:
                text = COLOURS.sub("", text)
            # A progress bar overwrites its line.
            for part in text.split("\r"):
                self._read_line(part.rstrip(), name)
        self._is_cut |= lines.is_partial

    def _read_line(self, line: str, name: str) -> None:
        """A line of torch or another program, or the messages of one or several processes."""
        if not self.rdma_setting and (match := RDMA_SETTING.search(line)):
            self.rdma_setting = match[0]
        if "NCCL" not in line:
            if line:
                self._read_foreign(line, name)
            return
        prefixes = [*PREFIX.finditer(line)]
        cut = None if prefixes else CUT_PREFIX.search(line)
        if version := VERSION.search(line):
            if "+" in version[1]:
                self.versions.add(version[1])
            elif ERROR_VERSION.fullmatch(version[1]):
                self.versions_of_errors.add(version[1])
            self.num_lines += not prefixes and cut is None
        if cut is not None:
            self._read_cut_line(line, cut, name)
            return
        starts = [*(prefix.start() for prefix in prefixes), len(line)]
        if foreign := line[: starts[0]].strip():
            self._read_foreign(foreign, name)
        for prefix, end in zip(prefixes, starts[1:], strict=True):
            process = self._process(prefix["host"], int(prefix["pid"]))
            source = prefix["source"] if prefix["level"] == "WARN" else None
            self._read_message(process, line[prefix.end() : end], source)

    def _read_foreign(self, text: str, name: str) -> None:
        """A line, or its beginning, that NCCL did not write."""
        if match := INTERFACE.search(text):
            self._interface = match[1].strip("\"'")
        self.routes.read(text, name)
        self.faults.read(LogLine(text=text, file=name, setting=_interface_setting(self._interface)))

    def _read_cut_line(self, line: str, cut: re.Match[str], name: str) -> None:
        """A line of NCCL without host and process. `name`: of the file."""
        process = self._process(name, 0)
        process.is_named = False
        words = line[: cut.start()].split()
        source = " ".join([*words[-1:], ""]) if cut["level"] == "WARN" else None
        self._read_message(process, line[cut.end() :], source)

    def _read_message(self, process: LoggedProcess, text: str, source: str | None) -> None:
        """`source`: of a warning, NCCL's source file."""
        self.num_lines += 1
        if source is not None:
            self._read_warning(process, source, text)
        elif match := CHANNEL.match(text):
            self._links.read_channel(process, match)
        elif match := INIT.search(text):
            process.read_init(match)
        elif match := DEVICES.match(text):
            self.faults.context.read(text, LinePlace(self._file, 0))
            for number, device, details in DEVICE.findall(match[2].partition("; OOB")[0]):
                process.devices[f"{match[1]}/{number}"] = f"{device} {details}".strip()
        else:
            self._read_setting(process, text)

    def _read_setting(self, process: LoggedProcess, text: str) -> None:
        """What a process chose or was given, and conditions that may explain a fault."""
        if match := NETWORK.match(text):
            process.network = (match[1] or match[2]).strip()
        elif match := INTERFACE.match(text):
            process.interface = match[1]
            self._interface = match[1]
        elif match := BOOTSTRAP.match(text):
            process.bootstrap = (match[1], match[2])
        elif match := MISSING_PLUGIN.match(text):
            process.missing_plugin = match[1]
        elif CONNECTED.match(text):
            process.is_connected = True
        else:
            self.faults.read(
                LogLine(text=text, origin=self._origin(process), file=self._file, is_info=True)
            )

    def _origin(self, process: LoggedProcess) -> str:
        origin = f"{process.host}:{process.pid}"
        self._processes_by_origin[origin] = process
        return origin

    def _process(self, host: str, pid: int) -> LoggedProcess:
        process = self.processes.get((host, pid))
        if process is None:
            process = self._process_with_longer_name(host, pid) or LoggedProcess(host=host, pid=pid)
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

    def _read_warning(self, process: LoggedProcess, source: str, text: str) -> None:
        self.faults.read(
            LogLine(
                text=text,
                source=f"{source}NCCL WARN ",
                origin=self._origin(process),
                file=self._file,
                is_warning=True,
                setting=_interface_setting(process.interface),
            )
        )

    # What they show

    @property
    def is_partial(self) -> bool:
        """Whether the middle of a long log was not read, or not all connections were kept."""
        return self._is_cut or self._links.is_partial

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

    def differing_versions(self) -> list[str]:
        """The versions of NCCL that banners and errors name; none if they are the same."""
        numbers = {version.partition("+")[0] for version in self.versions}
        names = self.versions | (self.versions_of_errors - numbers)
        return sorted(names) if len(names) > 1 else []

    def hosts_without_gpu_direct(self) -> list[str]:
        """Those that use RDMA without it."""
        return self._links.hosts_without_gpu_direct()

    def links(self) -> list[LoggedLink]:
        return self._links.links(self.world_size)

    def name_of(self, origin: str) -> str:
        """The process of a fault, or where it is."""
        process = self._processes_by_origin.get(origin)
        return origin if process is None else process.name


def _interface_setting(interface: str) -> str:
    return f": NCCL_SOCKET_IFNAME={interface} names none" if interface else ""
