"""When the user's command began, so that a run can say how long it took from there to its first step.

Our own launcher tells it to the ranks that it starts first. Ranks that it starts again, those of another launcher, and
those of a command that was given on another host count from their own beginning. All times are of this machine's clock
since boot: the clocks of two hosts are never compared.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

COMMAND_START = "DRUMLINE_COMMAND_START"
OWN_STAT = Path("/proc/self/stat")
# Fields of the file before the one we want, counted from behind the name, which may hold blanks.
STARTTIME = 19
_began: float | None = None


def now() -> float:
    """Seconds on the clock that processes are dated by."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def begin_now() -> None:
    """This process has waited for something to do, and that begins now."""
    global _began
    _began = now()


def process_start() -> float:
    """When this process began, Python's own start included; now, where the system does not tell."""
    if _began is not None:
        return _began
    try:
        fields = OWN_STAT.read_text(encoding="utf-8").rpartition(")")[2].split()
        start = int(fields[STARTTIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now()
    return min(start, now())


def command_start(environment: Mapping[str, str]) -> float | None:
    """When the launcher of this rank began, if it said so and that can be true."""
    try:
        start = float(environment.get(COMMAND_START) or math.nan)
    except ValueError:
        return None
    return start if 0 <= start <= process_start() else None
