"""What the kernel and NCCL know of a fault: the kernel's log, out-of-memory kills, the state of a
network interface, and the answer of NCCL's RAS thread."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.base.text import memory_size
from drumline.base.untrusted import DOCUMENT_BYTES, parse_json, whole_number
from drumline.net.interfaces import interfaces, is_enabled, is_own
from drumline.watch.cluster_state import RasRank

KERNEL_LOG = "/dev/kmsg"
MAX_LINES = 20
MAX_READ_S = 0.1
SLACK_S = 1.0
# Kernel messages about what can end, stop or slow a rank.
_MATTERS = re.compile(
    r"out of memory|oom-kill:|invoked oom-killer|blocked for more than|soft lockup|hard lockup|I/O error"
    r"|not responding|NVRM: Xid|segfault at|link is (down|up)|link is not ready|carrier lost|machine check"
    r"|hardware error|remounting filesystem read-only|-fs error",
    re.IGNORECASE,
)
GROUPS = Path("/sys/fs/cgroup")
# In the first process namespace, a pid is the one in the kernel's log.
NAMESPACE = Path("/proc/self/ns/pid")
FIRST_NAMESPACE = 4026531836
COUNTERS = ("memory.events", "memory.oom_control")
LIMITS = ("memory.max", "memory.limit_in_bytes")
NO_LIMIT = 1 << 60
# The kernel stamps its log by a clock of its own.
CLOCK_DRIFT_S = 1.0
_OOM_KILL = re.compile(
    r"oom-kill:constraint=(?P<constraint>\w+).*task_memcg=(?P<group>[^,]*),task=.*,pid=(?P<pid>\d+)"
)
# RAS answers after its TIMEOUT (whole seconds) without the peers that are silent, and that answer
# is awaited.
RAS_LIMIT_S = 1.5
# All processes share the port, and the kernel chooses one for each connection. One that is stopped
# never answers.
HANDSHAKE_S = 0.2
LOCALHOST = ("127.0.0.1", "::1")
RAS_REQUEST = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nSTATUS\n"
RAS_HELLO = b"SERVER PROTOCOL "
RAS_DONE = b"OK\n"
# NCCL 2.28 leaves out this comma.
_NO_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*"status")')
# Their counts differ across ranks in a healthy run.
POINT_TO_POINT = ("Send", "Recv", "SendRecv")
IN_PROGRESS = 7  # ncclInProgress, which is not an error


def kernel_lines(since: float) -> tuple[str, ...]:
    """Relevant lines since this time.monotonic(), the newest last. Empty if the log may not be
    read."""
    # The log's clock is not adjusted by NTP as time.monotonic() is: on a machine that is up for
    # months they differ by minutes.
    age_s = time.monotonic() - since
    begin_us = (time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - age_s - SLACK_S) * 1e6
    records = map(parse_log_record, _log_records())
    lines = (text for moment_us, text in records if moment_us >= begin_us and _MATTERS.search(text))
    return tuple(list(lines)[-MAX_LINES:])


def parse_log_record(record: bytes) -> tuple[int, str]:
    """`6,339,5140900,-;text`: when it was written, in microseconds of the kernel's clock, and the
    text; no text for lines of other programs, which may write there too."""
    head, _, text = record.decode(errors="replace").partition(";")
    priority, _, moment_us = head.split(",")[:3]
    is_kernel = (
        int(priority) < 8
    )  # above the lowest three bits is the kind of program; the kernel's is 0
    return int(moment_us), text.partition("\n")[0] if is_kernel else ""


def _log_records() -> list[bytes]:
    """The whole log, as far as it is still kept; a record is one read."""
    records: list[bytes] = []
    try:
        fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return records
    end = time.monotonic() + MAX_READ_S
    try:
        while time.monotonic() < end:
            with suppress(
                BrokenPipeError
            ):  # it was overwritten meanwhile: continue with the oldest that is left
                records.append(os.read(fd, 8192))
    except OSError:
        pass  # BlockingIOError: that was the last one; or it may be opened but not read
    finally:
        os.close(fd)
    return records


class OutOfMemoryCheck:
    """Created while the process runs; used when it has exited. The counter of its control group
    does not show which process was killed; the log does, by pids that are only valid outside of
    containers."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.monotonic() - CLOCK_DRIFT_S
        self._group, self._folder, self._top = memory_group(pid)
        self._num_kills = num_kills(self._folder)
        self._limit = tightest_limit(self._folder, self._top)

    def evidence(self) -> str:
        """Which memory was used up, if the kernel killed this process for it: `the limit of 512 MiB
        of its control group`. Empty: there is no such evidence."""
        kills = [match for line in kernel_lines(self._since) if (match := _OOM_KILL.match(line))]
        knows_pids = NAMESPACE.exists() and NAMESPACE.stat().st_ino == FIRST_NAMESPACE
        own_kills = [match for match in kills if knows_pids and int(match["pid"]) == self._pid]
        if not own_kills:
            if (knows_pids and kills) or num_kills(self._folder) <= self._num_kills:
                return ""  # it killed others, or none
            own_kills = [match for match in kills if match["group"].endswith(self._group)]
        limit = tightest_limit(self._folder, self._top) or self._limit
        if limit and (not own_kills or own_kills[-1]["constraint"] == "CONSTRAINT_MEMCG"):
            return f"the limit of {memory_size(limit)} of its control group"
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return f"the memory of the whole host, {memory_size(host_bytes)}"


def num_kills(folder: Path | None) -> int:
    """How many processes of the group were killed so far."""
    lines = (line for name in COUNTERS if folder for line in _text(folder / name).splitlines())
    return next((int(count) for kind, count in map(str.split, lines) if kind == "oom_kill"), 0)


def tightest_limit(folder: Path | None, top: Path | None) -> int | None:
    """The smallest limit of the group and its parents, or None."""
    if folder is None or top is None:
        return None
    folders = [ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(top)]
    texts = (_text(group / name).strip() for group in folders for name in LIMITS)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def memory_group(pid: int) -> tuple[str, Path | None, Path | None]:
    """The name of its control group, its folder, and the topmost visible folder above it."""
    for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        top = GROUPS / "memory" if "memory" in controllers.split(",") else GROUPS
        # In a container the top is the container's own group, whatever the name says.
        for folder in (top / name.lstrip("/"), top):
            if any((folder / counter).exists() for counter in COUNTERS):
                return name, folder, top
    return "/", None, None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def link_problem(address: str) -> str:
    """What is wrong with the interface that has this address: `eth0 is down`; empty where nothing
    is known."""
    # Whether the kernel allows to listen there: secondary addresses of an interface count as well.
    if not is_own(address):
        return f"no interface has the address {address} any more"
    for interface in interfaces():
        if address in (interface.address, *interface.ipv6) and not interface.is_up:
            is_down = not is_enabled(interface.name)
            return f"{interface.name} is down" if is_down else f"{interface.name} has no carrier"
    return ""


# NCCL's RAS: each process that uses NCCL has such a thread, and all of them listen at one port of the
# host. NCCL 2.28.7 and newer answer in JSON, and older ones are not asked. RAS may report healthy
# ranks during a hang, so its answer decides nothing: it is evidence in the diagnosis file.


async def ask_ras(address: str, pids: Mapping[int, int], world_size: int) -> tuple[RasRank, ...]:
    """What RAS at this address (`HOST:PORT`) knows about each rank of the job; empty if nothing of
    this job answers there within RAS_LIMIT_S, or if it is not an address of the loopback. `pids`: of
    this node's ranks, by rank."""
    with suppress(Exception):  # whatever answers there, a diagnosis does not fail for it
        for host, port in loopback_places(address):
            with suppress(ConnectionRefusedError):
                async with asyncio.timeout(RAS_LIMIT_S):
                    return ras_ranks(await request_status(host, port), pids, world_size)
    return ()


def loopback_places(address: str) -> list[tuple[str, int]]:
    """The addresses and the port to connect to; empty if others than this host could answer
    there."""
    host, _, digits = address.rpartition(":")
    port = whole_number(digits)
    host = host.strip("[]")
    if port is None or not 0 < port < 65536:
        return []
    if host == "localhost":
        return [(loopback, port) for loopback in LOCALHOST]
    try:
        return [(host, port)] if ipaddress.ip_address(host).is_loopback else []
    except ValueError:
        return []


async def request_status(host: str, port: int) -> bytes:
    """The answer of RAS, as JSON text; the caller limits the time."""
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(RAS_REQUEST)
            with suppress(TimeoutError):
                head = await asyncio.wait_for(reader.readline(), HANDSHAKE_S)
                lines = [await reader.readline() for _ in range(2)]
                if not head.startswith(RAS_HELLO) or any(line != RAS_DONE for line in lines):
                    raise ValueError(f"not RAS, or a version without JSON: {head!r}")
                return await _read_to_end(reader)
        finally:
            writer.close()


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while part := await reader.read(1 << 16):
        content += part
        if len(content) > DOCUMENT_BYTES:
            raise ValueError("the answer is too long")
    return bytes(content)


def ras_ranks(document: bytes, pids: Mapping[int, int], world_size: int) -> tuple[RasRank, ...]:
    """By rank, over the communicators that have all ranks of this job. Several jobs may share the
    port: a communicator belongs to this one if a rank of this node is in it, with its pid."""
    ranks: dict[int, RasRank] = {}
    for communicator in parse_json(_NO_COMMA.sub(rb"\1,\2", document))["communicators"]:
        members = communicator["ranks"]
        missing = communicator["missing_ranks"]
        is_ours = any(pids.get(entry["rank"]) == entry["pid"] for entry in (*members, *missing))
        if communicator["size"] == world_size and is_ours:
            for entry in (*_members(members), *_missing(missing)):
                ranks[entry.rank] = _merged(ranks.get(entry.rank), entry)
    return tuple(entry for _, entry in sorted(ranks.items()) if entry.rank < world_size)


def _members(entries: Sequence[Mapping[str, Any]]) -> list[RasRank]:
    ranks = []
    for entry in entries:
        status = entry["status"]
        codes = [int(status[name]) for name in ("init_state", "async_error")]
        counts = [
            int(count)
            for op, count in entry["collective_counts"].items()
            if op not in POINT_TO_POINT
        ]
        error = next((code for code in codes if code not in (0, IN_PROGRESS)), 0)
        is_aborted = bool(status["abort_flag"])
        ranks.append(
            RasRank(
                rank=int(entry["rank"]),
                num_collectives=sum(counts),
                error=error,
                is_aborted=is_aborted,
            )
        )
    return ranks


def _missing(entries: Sequence[Mapping[str, Any]]) -> list[RasRank]:
    """Ranks that do not answer RAS; or that do, and are not in this communicator any more, or not
    yet."""
    return [
        RasRank(
            rank=int(entry["rank"]), answers=not entry["status"]["unresponsive"], is_member=False
        )
        for entry in entries
    ]


def _merged(before: RasRank | None, entry: RasRank) -> RasRank:
    """A rank in two communicators."""
    if before is None:
        return entry
    return RasRank(
        rank=entry.rank,
        answers=before.answers and entry.answers,
        is_member=before.is_member and entry.is_member,
        num_collectives=before.num_collectives + entry.num_collectives,
        error=before.error or entry.error,
        is_aborted=before.is_aborted or entry.is_aborted,
    )
