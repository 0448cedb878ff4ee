"""Processes in /proc: their state, their limits, their tree, and how to end a whole tree.

Only the standard library, because guards and sidecars start with every job. Reads never wait for
the process, whatever it is blocked in. So files that need the lock of its memory (cmdline, environ,
maps) are not read, except in `processes_with_variable` and `processes_of_command`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

GONE = "X"
"""No such process."""
EXITED = ("Z", GONE)
STOPPED = ("T", "t")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# How long to wait for SIGKILL: the kernel cannot end a process that waits for a device.
KILL_WAIT_S = 5.0
PR_SET_PDEATHSIG = 1
CGROUPS = "/sys/fs/cgroup"


class ProcessStat(NamedTuple):
    """Some fields of /proc/PID/stat."""

    name: str
    state: str
    """One of R S D T t Z."""
    parent: int
    cpu_ticks: int
    """Summed over its threads."""
    num_threads: int
    start_ticks: int
    """Since the machine's start. With the pid it identifies a process: pids are reused."""
    exit_status: int
    """As wait() returns it; also 0 without permission to read it."""

    @property
    def age_s(self) -> float:
        """How long ago the process began."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / TICKS_PER_S


def parse_stat(text: bytes) -> ProcessStat:
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return ProcessStat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        exit_status=int(fields[49]),
    )


def read_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """None: there is no such process, or no such thread of it."""
    text = _read(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    return parse_stat(text) if text else None


def read_status(pid: int, thread: int | None = None) -> dict[str, str]:
    """/proc/PID/status by its names; empty when there is no such process."""
    text = _read(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status")
    pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def state_of(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat else GONE


def has_signal(status: dict[str, str], kind: str, number: int) -> bool:
    """Whether a field of `read_status` contains this signal: SigCgt (caught), SigBlk, SigPnd,
    ShdPnd."""
    return bool(int(status.get(kind, "0"), 16) >> (number - 1) & 1)


def threads(pid: int) -> list[int]:
    return _numbers_in(f"/proc/{pid}/task")


def io_bytes(pid: int) -> int | None:
    """Bytes that it has read and written so far, by calls and on disks; None without permission to
    read them."""
    words = _read(f"/proc/{pid}/io").split()
    if len(words) < 12:
        return None
    # rchar, wchar, read_bytes, write_bytes; the fields between them count calls.
    return sum(int(words[position]) for position in (1, 3, 9, 11))


class ThreadTimes(NamedTuple):
    """What the scheduler has counted for one thread."""

    run_ns: int
    wait_ns: int
    """In the run queue: it could run, and had no CPU."""
    num_slices: int

    def since(self, before: ThreadTimes) -> ThreadTimes:
        """What was counted after an earlier moment."""
        return ThreadTimes(*(now - then for now, then in zip(self, before, strict=True)))


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """By thread; empty when the process has exited, or where the kernel does not count."""
    times = {}
    for thread in threads(pid):
        words = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
        if len(words) == 3:
            times[thread] = ThreadTimes(*map(int, words))
    return times


class ProcessHandle:
    """One process, held by descriptors, so that a later process with the same pid is not mistaken
    for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat_fd: int | None = None
        self.exit_fd: int | None = None
        """Becomes readable when the process exits."""
        with suppress(OSError):
            self._stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            self.exit_fd = os.pidfd_open(pid)

    def stat(self) -> ProcessStat | None:
        with suppress(OSError):
            return None if self._stat_fd is None else parse_stat(os.pread(self._stat_fd, 4096, 0))
        return None

    def close(self) -> None:
        for fd in (self._stat_fd, self.exit_fd):
            if fd is not None:
                os.close(fd)
        self._stat_fd = None
        self.exit_fd = None


# Limits


def cgroup_values(name: str) -> list[str]:
    """The contents of this file for the root that this process sees and for its own control group,
    where they exist."""
    own_group = os.fsdecode(_read("/proc/self/cgroup")).rpartition("::/")[2].strip()
    contents = (_read(f"{CGROUPS}/{group}/{name}").decode().strip() for group in ("", own_group))
    return [content for content in contents if content]


def cpu_quota() -> float | None:
    """How many CPUs' time the container gets; None: no limit."""
    limits = (limit.split() for limit in cgroup_values("cpu.max"))
    cpus = [float(quota) / float(period) for quota, period in limits if quota != "max"]
    return min(cpus, default=None)


def usable_cpus() -> float:
    """As many as this process may use: by its affinity mask, and by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, cpu_quota() or allowed)


# Trees


def parent_of(pid: int) -> int:
    """0 for a process that has exited, reaped or not."""
    stat = read_stat(pid)
    return 0 if stat is None or stat.state in EXITED else stat.parent


def children(pid: int) -> list[int]:
    """The children of a process. Fast, but may miss one that starts or exits now; some kernels lack
    these lists."""
    # Each thread has its own list.
    lists = (_read(f"/proc/{pid}/task/{thread}/children") for thread in threads(pid))
    return [int(child) for children_of_thread in lists for child in children_of_thread.split()]


def descendants(pid: int) -> list[int]:
    """The living children of a process, their children, and so on. Reads the state of every process
    on the machine."""
    parents = {process: parent_of(process) for process in _numbers_in("/proc")}
    all_generations: list[int] = []
    generation = [pid]
    while generation:
        generation = [process for process, parent in parents.items() if parent in generation]
        all_generations += generation
    return all_generations


def processes_with_variable(*assignments: str) -> list[int]:
    """The processes that were started with one of these `NAME=value` in their environment, except
    this one. A process that hangs with the lock of its memory held blocks this call."""
    encoded = {assignment.encode() for assignment in assignments}

    def has_variable(pid: int) -> bool:
        return not encoded.isdisjoint(_read(f"/proc/{pid}/environ").split(b"\0"))

    return [pid for pid in _numbers_in("/proc") if pid != os.getpid() and has_variable(pid)]


def processes_of_command(*last_words: str) -> list[int]:
    """This user's processes whose command ends with these words, except this one. Blocks like
    `processes_with_variable`."""
    ending = b"".join(os.fsencode(word) + b"\0" for word in last_words)

    def matches(pid: int) -> bool:
        with suppress(OSError):
            is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116 - it starts fast
            return is_own and _read(f"/proc/{pid}/cmdline").endswith(b"\0" + ending)
        return False

    return [pid for pid in _numbers_in("/proc") if pid != os.getpid() and matches(pid)]


def _numbers_in(folder: str) -> list[int]:
    """The numeric names in a folder; empty if it does not exist, as on systems without /proc."""
    with suppress(OSError):
        return [int(name) for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208 - it starts fast
    return []


# Ending processes


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


class Termination:
    """Ends processes: SIGTERM to the topmost, which end their children; after the grace period
    SIGKILL to all."""

    def __init__(self, remaining: Callable[[], Iterable[int]], grace_s: float) -> None:
        """`remaining`: the pids that are left."""
        self._remaining = remaining
        self._deadline = time.monotonic() + grace_s
        self._signalled: set[int] = set()

    def shorten(self, grace_s: float) -> None:
        """Limit the rest of the grace period to this."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def step(self) -> bool:
        """Call it repeatedly. True: all have exited, or cannot be made to."""
        remaining = set(self._remaining())
        now = time.monotonic()
        if now >= self._deadline:
            send_signal(remaining, signal.SIGKILL)
        else:
            # Children of a process that has exited are then topmost.
            topmost = {pid for pid in remaining if parent_of(pid) not in remaining}
            self._terminate(topmost - self._signalled)
        return not remaining or now >= self._deadline + KILL_WAIT_S

    def _terminate(self, pids: set[int]) -> None:
        self._signalled |= pids
        send_signal(pids, signal.SIGTERM)
        # without it a stopped process does not receive SIGTERM
        send_signal(pids, signal.SIGCONT)

    def wait(self) -> None:
        while not self.step():
            time.sleep(0.05)


def end_with_parent(parent: int) -> bool:
    """The kernel sends this process a SIGTERM when its parent dies, even if that is killed with -9.
    Linux only. False: it has died already."""
    import ctypes  # not before: most processes do without

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command that does the same and gets a SIGTERM when this process dies: this file, run as a
    program, becomes it. torchrun's agent ends its ranks on a SIGTERM; a rank alone ends at once."""
    # Without site-packages and the user's own paths: it starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _read(path: str) -> bytes:
    """Empty when the process has exited or may not be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - it starts fast
            return file.readall()
    except OSError:
        return b""


if __name__ == "__main__":
    if not end_with_parent(int(sys.argv[1])):
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the same command, without a shell
