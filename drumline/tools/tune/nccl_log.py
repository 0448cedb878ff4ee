"""Reads logs of a job, with NCCL's debug lines (NCCL_DEBUG=INFO) or without: which ranks are where,
how each pair is connected, and what went wrong.

A log may have lines of many ranks and programs, lines that two processes wrote into each other, and
garbage; what does not match is skipped. Time is linear in the log's size, and memory is bounded.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import re
from collections.abc import Iterator
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
    shows them:

        gpu-01: 10.0.0.0/16 dev eth0 proto kernel scope link src 10.0.0.4
        gpu-01:     inet 10.0.0.4/16 brd 10.0.255.255 scope global eth0
    """

    def __init__(self) -> None:
        self._networks: dict[tuple[str, str], ipaddress.IPv4Network] = {}

    def read(self, text: str, name: str) -> None:
        """`name`: of the file, for lines before which no launcher wrote a host."""
        if " scope " not in text or len(self._networks) >= MAX_NETWORKS:
            return

        match = LINK_ROUTE.search(text) or ADDRESS.search(text)
        if match is None:
            return

        host = text[: match.start()].strip(" []():|") or name
        with contextlib.suppress(ValueError):  # 300.0.0.0
            network = ipaddress.IPv4Network(match["network"], strict=False)
            self._networks[host, match["interface"]] = network

    def shared_networks(self) -> dict[str, str]:
        """Two interfaces of a host whose networks overlap, in words; the first of each host: `{'gpu-01':
        'eth0 and eth1 are in the same network (10.0.0.0/16)'}`."""
        shared: dict[str, str] = {}
        for first, second in combinations(self._networks, 2):
            host, interface = first
            network = self._networks[first]
            if second[0] == host and network.overlaps(self._networks[second]):
                words = f"{interface} and {second[1]} are in the same network ({network})"
                shared.setdefault(host, words)

        return shared


# Of a larger file or pipe only the beginning and the end are read: the connections, and the faults.
HALF_BYTES = 48 << 20
PART_BYTES = 1 << 20
MAX_LINE = 4096  # NCCL writes 1 kB at most


def _lines(file: BinaryIO) -> Iterator[bytes]:
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
# of torch's errors; older ones print 2.12.12 as 21.2.12
ERROR_VERSION = re.compile(r"2\.\d+\.\d+")
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
SETTING = re.compile(
    r"(?!NCCL_(?:SOCKET_IFNAME|IB_HCA|DEBUG|HOSTID|TOPO|IB_GID))"  # these may differ
    r"(NCCL_\w{1,60}) set (?:by environment )?to (\S{1,80}?)\.?$|(cudaDriverVersion) (\d{4,6})"
)
CONNECTED = re.compile(r"Connected all (?:rings|trees)")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[0\])?([^\s:<>]{1,64}):([^\s<>]{1,64})<")


class NcclLog:
    """What the lines of one or several logs show. NCCL's begin with a process, and have a level:

    gpu-01:4711:4720 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
    """

    def __init__(self) -> None:
        self.processes: dict[str, LoggedProcess] = {}
        """By `HOST:PID`, or `FILE:0` for lines that name no process."""
        self.connections = LoggedLinks()
        self.routes = LoggedRoutes()
        self.faults = JobFaults()
        self.versions: set[str] = set()
        self.versions_of_errors: set[str] = set()
        self.num_lines = 0
        """Of NCCL."""
        self.rdma_setting = ""
        """What shows that the job is meant to use InfiniBand."""
        self._is_cut = False
        """Whether the middle of a long log was not read."""
        self._file = ""
        """That is read."""
        self._interface = ""
        """The last value of NCCL_SOCKET_IFNAME."""

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        self.faults.begin_file()
        self._file = name
        for line in self._lines_of(file):
            text = line.decode(errors="replace")
            if "\x1b" in text:
                text = COLOURS.sub("", text)

            # A progress bar overwrites its line.
            for part in text.split("\r"):
                self._read_line(part.rstrip())

    def _lines_of(self, file: BinaryIO) -> Iterator[bytes]:
        """Of a long file or pipe only those of the beginning and the end, so that memory is
        bounded."""
        yield from _lines(file)
        # It is read to its end, or the program that writes into a pipe would be stopped.
        tail = bytearray()
        while part := file.read(PART_BYTES):
            tail += part
            if len(tail) > HALF_BYTES:
                self._is_cut = True
                del tail[:-HALF_BYTES]

        yield from _lines(io.BytesIO(tail))

    def _read_line(self, line: str) -> None:
        """A line of torch or another program, or the messages of one or several processes, which may have
        written into one line:

        gpu-01:11:12 [0] NCCL INFO Connected all gpu-01:13:14 [1] NCCL INFO Connected all rings
        """
        if not self.rdma_setting and (match := RDMA_SETTING.search(line)):
            self.rdma_setting = match[0]

        if "NCCL" not in line:
            self._read_foreign(line)
            return

        has_version = self._read_version(line)
        prefixes = [*PREFIX.finditer(line)]
        cut = CUT_PREFIX.search(line)

        if cut is not None and not prefixes:
            self._read_cut_line(line, cut)
            return

        if has_version and cut is None:
            self.num_lines += 1  # a line of its own, without a level

        starts = [*(prefix.start() for prefix in prefixes), len(line)]
        self._read_foreign(line[: starts[0]].strip())

        for prefix, end in zip(prefixes, starts[1:], strict=True):
            process = self._process(prefix["host"], int(prefix["pid"]))
            self._read_message(process, prefix, prefix["source"], line[prefix.end() : end])

    def _read_version(self, line: str) -> bool:
        """Whether a line names the version of NCCL: `NCCL version 2.21.5+cuda12.4`. Banners have the
        version of CUDA, errors of torch only that of NCCL."""
        match = VERSION.search(line)
        if match is None:
            return False

        version = match[1]
        if "+" in version:
            self.versions.add(version)
        elif ERROR_VERSION.fullmatch(version):
            self.versions_of_errors.add(version)

        return True

    def _read_foreign(self, text: str) -> None:
        """A line, or its beginning, that NCCL did not write."""
        if not text:
            return

        if match := INTERFACE.search(text):
            self._interface = match[1].strip("\"'")

        self.routes.read(text, self._file)
        setting = _interface_setting(self._interface)
        self.faults.read(LogLine(text=text, file=self._file, setting=setting))

    def _read_cut_line(self, line: str, cut: re.Match[str]) -> None:
        """A line of NCCL without host and process: `misc/socket.cc:58 NCCL WARN Connect to ... failed`."""
        process = self._process(self._file, 0)
        process.is_named = False
        words_before = line[: cut.start()].split()
        source = f"{words_before[-1]} " if words_before else ""
        self._read_message(process, cut, source, line[cut.end() :])

    def _read_message(
        self,
        process: LoggedProcess,
        prefix: re.Match[str],
        source: str,
        text: str,
    ) -> None:
        """A message of one process. `source`: NCCL's source file, which a warning names."""
        self.num_lines += 1
        if prefix["level"] == "WARN":
            self._read_fault(process, text, source=f"{source}NCCL WARN ")
        elif match := CHANNEL.match(text):
            self.connections.read_channel(process, match)
        elif match := INIT.search(text):
            process.read_init(match)
        elif match := DEVICES.match(text):
            self._read_devices(process, match)
        else:
            self._read_setting(process, text)

    def _read_devices(self, process: LoggedProcess, match: re.Match[str]) -> None:
        """`NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE; OOB eth0:10.0.0.4<0>`."""
        self.faults.context.read(match[0], LinePlace(self._file, 0))
        devices, _, _ = match[2].partition("; OOB")
        for number, device, details in DEVICE.findall(devices):
            process.devices[f"{match[1]}/{number}"] = f"{device} {details}".strip()

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
            if match := SETTING.match(text):
                process.settings[match[1] or match[3]] = match[2] or match[4]

            self._read_fault(process, text)

    def _read_fault(self, process: LoggedProcess, text: str, source: str = "") -> None:
        """A line that may show a fault; without a source it is of level INFO."""
        self.faults.read(
            LogLine(
                text=text,
                source=source,
                process=process.origin,
                file=self._file,
                is_info=not source,
                setting=_interface_setting(process.interface),
            )
        )

    def _process(self, host: str, pid: int) -> LoggedProcess:
        """Two processes that write into one line put the end of one before the other's host
        name."""
        origin = f"{host}:{pid}"
        if origin in self.processes:
            return self.processes[origin]

        process = LoggedProcess(host=host, pid=pid)
        for start in range(1, len(host)):
            if origin[start:] in self.processes:
                process = self.processes[origin[start:]]
                break

        self.processes[origin] = process
        return process

    # What they show

    @property
    def is_partial(self) -> bool:
        """Whether the middle of a long log was not read, or not all connections were kept."""
        return self._is_cut or self.connections.is_partial

    @property
    def world_size(self) -> int:
        """Of the largest communicator."""
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
        """How ranks send to each other."""
        return self.connections.links(self.world_size)

    def differing_versions(self) -> list[str]:
        """The versions of NCCL that banners and errors name; none if they are the same."""
        numbers = {version.partition("+")[0] for version in self.versions}
        names = self.versions | (self.versions_of_errors - numbers)
        return sorted(names) if len(names) > 1 else []

    def differing_settings(self) -> dict[str, list[str]]:
        """The values of what is not the same in all processes that show it: `{'NCCL_ALGO': ['Ring', 'Tree']}`."""
        values: dict[str, set[str]] = {}
        for process in self.processes.values():
            for name, value in process.settings.items():
                values.setdefault(name, set()).add(value)

        return {name: sorted(texts) for name, texts in values.items() if len(texts) > 1}

    def name_of(self, origin: str) -> str:
        """The process of a fault, or where it is."""
        process = self.processes.get(origin)
        return origin if process is None else process.name


def _interface_setting(interface: str) -> str:
    """What a message about a missing interface adds."""
    return f": NCCL_SOCKET_IFNAME={interface} names none" if interface else ""
