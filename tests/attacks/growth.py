"""How the time of a reader grows with its input: as a ratio, which a crowded machine does not
change much."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES = 3


def cpu_s(action: Callable[[], object]) -> float:
    """The shortest of a few: others only add to it."""
    return min(_once(action) for _ in range(TIMES))


def _once(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def growth(read: Callable[[int], object], *, size: int, factor: int = 4) -> float:
    """How many times as long a `factor` times larger input takes: about the factor where the time
    is linear, its square where it is quadratic."""
    read(size)  # what is loaded and cached at the first call
    return cpu_s(lambda: read(factor * size)) / cpu_s(lambda: read(size))
