"""Bounds for code under attack: what hangs or takes much memory fails, and takes nothing else down
with it."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Hangs(BaseException):
    """Not an Exception: no reader may take it for damage."""


@contextmanager
def bounded(*, seconds: float = 60.0, cpu_s: float = 1.0, megabytes: int = 400) -> Iterator[None]:
    """`seconds` is for what blocks; `cpu_s` is the time of this process alone, whatever else the
    machine does."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + (megabytes << 20)

    def hangs(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"it takes longer than {seconds} s")

    handler = signal.signal(signal.SIGALRM, hangs)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    began = time.process_time()
    try:
        yield
    except MemoryError as error:
        raise Hangs(f"it takes more than {megabytes} MB") from error
    finally:
        took = time.process_time() - began
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
    assert took < cpu_s, f"it took {took:.1f} s of a processor"
