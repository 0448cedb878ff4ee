"""Was a process ended for want of memory? The kernel counts that for each control group, and has it in its log.

The counters are read when the look begins and compared when the process has ended. They do not say which process of
the group it was; the log does, by numbers that are only valid outside of containers.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from drumline.watch.sidecar.kernel import kernel_lines

MOUNTS = Path("/proc/self/mountinfo")
# Of a process in no process namespace but the first: its number is the one in the kernel's log.
FIRST_NAMESPACE = "pid:[4026531836]"
COUNTERS = ("memory.events", "memory.oom_control")
LIMITS = ("memory.max", "memory.limit_in_bytes")
NO_LIMIT = 1 << 60
_KILL = re.compile(
    r"oom-kill:constraint=(?P<constraint>\w+).*task_memcg=(?P<group>[^,]*),task=.*,pid=(?P<pid>\d+)"
)


class MemoryWatch:
    """Made while the process lives; asked when it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.monotonic()
        self._group = _group_name(pid)
        self._folder, self._top = group_folder(self._group)
        self._kills = num_kills(self._folder)
        self._limit = tightest_limit(self._folder, self._top)

    def evidence(self) -> str:
        """Whose memory was used up, when the kernel ended this process for it: `the limit of 512 MiB of its control
        group`. Empty: nothing says so."""
        found = [match for line in kernel_lines(self._since) if (match := _KILL.match(line))]
        if _sees_all_processes():
            if mine := [match for match in found if int(match["pid"]) == self._pid]:
                return self._whose(is_group=mine[-1]["constraint"] == "CONSTRAINT_MEMCG")
            if found:
                return ""  # it ended others
        if num_kills(self._folder) <= self._kills:
            return ""
        mine = [match for match in found if match["group"].endswith(self._group)]
        return self._whose(is_group=not mine or mine[-1]["constraint"] == "CONSTRAINT_MEMCG")

    def _whose(self, *, is_group: bool) -> str:
        limit = tightest_limit(self._folder, self._top) or self._limit
        if is_group and limit:
            return f"the limit of {as_size(limit)} of its control group"
        return f"the memory of the whole host, {as_size(_host_memory())}"


def num_kills(folder: Path | None) -> int:
    """How many processes of the group were ended so far."""
    texts = [_text(folder / name) for name in COUNTERS] if folder else []
    for text in texts:
        pairs = (line.split() for line in text.splitlines())
        counts = [int(count) for kind, count in pairs if kind == "oom_kill"]
        if counts:
            return counts[0]
    return 0


def tightest_limit(folder: Path | None, top: Path | None) -> int | None:
    """The smallest in force, of the group or one that it is in; None: there is none."""
    if folder is None or top is None:
        return None
    folders = [one for one in (folder, *folder.parents) if one.is_relative_to(top)]
    texts = (_text(one / name).strip() for one in folders for name in LIMITS)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def group_folder(group: str) -> tuple[Path | None, Path | None]:
    """Where the kernel shows this group, and the uppermost one above it that can be seen from here."""
    for line in _text(MOUNTS).splitlines():
        mount, _, kind = line.partition(" - ")
        options = kind.split()
        if not (options[0] == "cgroup2" or (options[0] == "cgroup" and "memory" in options[2].split(","))):
            continue
        root, top = mount.split()[3:5]
        # In a container the mount begins at the container's own group, whatever the name says.
        inner = group.removeprefix(root.rstrip("/")).lstrip("/") if group.startswith(root) else ""
        for folder in (Path(top, inner), Path(top)):
            if any((folder / name).exists() for name in COUNTERS):
                return folder, Path(top)
    return None, None


def as_size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.3g} GiB" if gib >= 1 else f"{num_bytes / 2**20:.4g} MiB"


def _group_name(pid: int) -> str:
    """The memory controller's group, or the only one where there is one tree for all."""
    lines = [line.split(":", 2) for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines()]
    groups = {controllers: path for _, controllers, path in lines}
    own = [path for controllers, path in groups.items() if "memory" in controllers.split(",")]
    return own[0] if own else groups.get("", "/")


def _sees_all_processes() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE
    except OSError:
        return False


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
