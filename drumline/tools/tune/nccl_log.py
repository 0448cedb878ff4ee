"""Reads logs of a job, with NCCL's debug lines (NCCL_DEBUG=INFO) or without: which ranks are where,
how each pair is connected, and what went wrong.

A log may have lines of many ranks and programs, lines that two processes wrote into each other, and
garbage; what does not match is skipped. Time is linear in the log's size, and memory is bounded.
"""

from __future__ import annotations

import re
from typing import BinaryIO

from drumline.tools.tune.bounded_lines import BoundedLines
from drumline.tools.tune.job_faults import JobFaults, LogLine
from drumline.tools.tune.logged_links import CHANNEL, LoggedLink, LoggedLinks
from drumline.tools.tune.logged_process import INIT, LoggedProcess

MAX_PROCESSES = 50_000
PREFIX = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?P<source>(?:\S{1,300} ){0,3}?)"
    r"NCCL (?P<level>INFO|WARN) "
)
COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S{0,20})")
DEVICES = re.compile(r"NET/(Socket|IB) : Using (.*)")
DEVICE = re.compile(r"\[(\d{1,4})\]([^\s:<>]{1,64})(?::([^\s<>]{1,64}))?")
NETWORK = re.compile(r"Using network (\S.{0,60})")
INTERFACE = re.compile(r"NCCL_SOCKET_IFNAME set (?:by environment )?to (\S{1,100})")
MISSING_PLUGIN = re.compile(
    r"NET/Plugin ?: (?:Could not find: ?|No plugin found \()(\S{1,100}?)[.,)]*(?:\s|$)"
)
CONNECTED = re.compile(r"Connected all (?:rings|trees)")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[0\])?([^\s:<>]{1,64}):([^\s<>]{1,64})<")


class NcclLog:
    """What the lines of one or several logs show."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self.versions: set[str] = set()
        self.num_lines = 0  # of NCCL
        self._is_cut = False  # whether the middle of a long log was not read
        self.faults = JobFaults()
        self._links = LoggedLinks()
        self._processes_by_origin: dict[str, LoggedProcess] = {}

    def read(self, file: BinaryIO, name: str) -> None:
        """Add a log; `name`: for messages about lines that name no process."""
        self.faults.begin_file()
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

    def _read_message(self, prefix: re.Match[str], text: str) -> None:
        self.num_lines += 1
        process = self._process(prefix["host"], int(prefix["pid"]))
        if prefix["level"] == "WARN":
            self._read_warning(process, prefix["source"], text)
        elif match := CHANNEL.match(text):
            self._links.read_channel(process, match)
        elif match := INIT.search(text):
            process.read_init(match)
        elif match := DEVICES.match(text):
            for number, device, details in DEVICE.findall(match[2].partition("; OOB")[0]):
                process.devices[f"{match[1]}/{number}"] = f"{device} {details}".strip()
        else:
            self._read_setting(process, text)

    def _read_setting(self, process: LoggedProcess, text: str) -> None:
        """What a process chose or was given, and conditions that may explain a fault."""
        if match := NETWORK.match(text):
            process.network = match[1].strip()
        elif match := INTERFACE.match(text):
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
        if len(self._processes_by_origin) < MAX_PROCESSES:
            self._processes_by_origin[origin] = process
        return origin

    def _process(self, host: str, pid: int) -> LoggedProcess:
        process = self.processes.get((host, pid))
        if process is None:
            process = self._process_with_longer_name(host, pid) or LoggedProcess(host=host, pid=pid)
            if len(self.processes) < MAX_PROCESSES:
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
        setting = (
            f": NCCL_SOCKET_IFNAME={process.interface} names none" if process.interface else ""
        )
        self.faults.read(
            LogLine(
                text=text,
                source=f"{source}NCCL WARN ",
                origin=self._origin(process),
                is_warning=True,
                setting=setting,
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

    def links(self) -> list[LoggedLink]:
        return self._links.links(self.ranks, self.world_size)

    def name_of(self, origin: str) -> str:
        """The process of a fault, or where it is."""
        process = self._processes_by_origin.get(origin)
        return origin if process is None else process.name
