"""What the kernel knows of a fault: its log, out-of-memory kills, the state of a network
interface."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from drumline.base.text import memory_size
from drumline.net.interfaces import interfaces, is_enabled, is_own

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


def kernel_lines(since: float) -> tuple[str, ...]:
    """Relevant lines since this time.monotonic(), the newest last. Empty if the log may not be
    read."""
    # The log's clock is not adjusted by NTP as time.monotonic() is: on a machine that is up for
    # months they differ by minutes.
    age_s = time.monotonic() - since
    begin_s = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - age_s - SLACK_S

    lines = []
    for moment_us, text in map(parse_log_record, _log_records()):
        if moment_us >= begin_s * 1e6 and _MATTERS.search(text):
            lines.append(text)
    return tuple(lines[-MAX_LINES:])


def parse_log_record(record: bytes) -> tuple[int, str]:
    """`6,339,5140900,-;text`: when it was written, in microseconds of the kernel's clock, and the
    text; no text for lines of other programs, which may write there too."""
    head, _, text = record.decode(errors="replace").partition(";")
    priority, _, moment_us = head.split(",")[:3]

    # above the lowest three bits is the kind of program; the kernel's is 0
    is_kernel = int(priority) < 8
    first_line, _, _ = text.partition("\n")
    return int(moment_us), first_line if is_kernel else ""


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
            # it was overwritten meanwhile: continue with the oldest that is left
            with suppress(BrokenPipeError):
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
        kills = list(filter(None, map(_OOM_KILL.match, kernel_lines(self._since))))
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


def num_kills(folder: Path) -> int:
    """How many processes of the group were killed so far."""
    for name in COUNTERS:
        for line in _text(folder / name).splitlines():
            kind, count = line.split()
            if kind == "oom_kill":
                return int(count)
    return 0


def tightest_limit(folder: Path, top: Path) -> int | None:
    """The smallest limit of the group and its parents, or None."""
    folders = [ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(top)]
    texts = (_text(group / name).strip() for group in folders for name in LIMITS)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def memory_group(pid: int) -> tuple[str, Path, Path]:
    """The name of its control group, its folder, and the topmost visible folder above it; where it
    has none, the folder of all groups, which has neither counters nor limits."""
    for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        top = GROUPS / "memory" if "memory" in controllers.split(",") else GROUPS

        # In a container the top is the container's own group, whatever the name says.
        for folder in (top / name.lstrip("/"), top):
            if any((folder / counter).exists() for counter in COUNTERS):
                return name, folder, top

    return "/", GROUPS, GROUPS


def _text(path: Path) -> str:
    """Empty: there is no such file, or it may not be read."""
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
