"""The kernel's own log: who it ended for want of memory, which disk or link failed. Empty where it may not be read."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

LOG = "/dev/kmsg"
MAX_LINES = 20
MAX_READ_S = 0.1
SLACK_S = 1.0
# What can end, stop or slow a rank, in the kernel's words.
_MATTERS = re.compile(
    r"out of memory|oom-kill:|invoked oom-killer|blocked for more than|soft lockup|hard lockup|I/O error"
    r"|not responding|NVRM: Xid|segfault at|link is (down|up)|link is not ready|carrier lost|machine check"
    r"|hardware error|remounting filesystem read-only|-fs error",
    re.IGNORECASE,
)


def kernel_lines(since: float) -> tuple[str, ...]:
    """Lines that may matter since that moment of time.monotonic(), the newest last."""
    begin_us = _kernel_us(since)
    records = (parse_record(record) for record in _records())
    lines = (text for moment_us, text in records if moment_us >= begin_us and _MATTERS.search(text))
    return tuple(list(lines)[-MAX_LINES:])


def parse_record(record: bytes) -> tuple[int, str]:
    """`6,339,5140900,-;text`: when it was written, in microseconds of the kernel's clock, and the text. Lines of other
    programs, who may write there too, have none."""
    head, _, text = record.decode(errors="replace").partition(";")
    priority, _, moment_us = head.split(",")[:3]
    is_kernel = int(priority) < 8  # above the lowest three bits is the kind of program; the kernel's is 0
    return int(moment_us), text.partition("\n")[0] if is_kernel else ""


def _records() -> list[bytes]:
    """The whole log, as far as it is still kept; a record is one read."""
    records: list[bytes] = []
    try:
        fd = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return records
    end = time.monotonic() + MAX_READ_S
    try:
        while time.monotonic() < end:
            with suppress(
                BrokenPipeError
            ):  # it was overwritten meanwhile: go on with the oldest that is left
                records.append(os.read(fd, 8192))
    except OSError:
        pass  # BlockingIOError: that was the last one; or it may be opened but not read
    finally:
        os.close(fd)
    return records


def _kernel_us(since: float) -> float:
    """The log's clock is not steered by the network's time as time.monotonic() is: on a machine that is up for months
    they differ by minutes."""
    age_s = time.monotonic() - since
    return (time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - age_s - SLACK_S) * 1e6
