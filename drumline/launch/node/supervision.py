"""The options of a node's agent, and what it reports to its supervisor: starts and failures of ranks, at once.

The agent knows of a failure before it ends the other ranks, which may take long, and whoever asks which rank was first
over several nodes must know of it then. Times are by this machine's monotonic clock, which does not jump; the
controller knows how it differs from its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.launch.node import guard
from drumline.launch.node.standby import Standby
from drumline.launch.rank_environment import ScriptWatch
from drumline.launch.ssh.log_follower import is_traceback, last_lines

# A traceback that was written this short before the end was about the end.
LAST_WORDS_S = 30.0
LAST_LINES = 80


@dataclass(frozen=True)
class Supervision:
    """The options of a node's job."""

    job: str = field(default_factory=guard.new_job)
    grace_s: float = guard.DEFAULT_GRACE_S
    """Between the SIGTERM and the SIGKILL of ranks that are to end."""
    folder: Path | None = None
    """Where ranks write to; None leaves their output to the screen."""
    report: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Called with starts and failures of ranks."""
    secret: str | None = field(default=None, repr=False)
    """What all nodes of the job were given; None: nothing (`net/secrets.py`)."""
    script_watch: ScriptWatch | None = None
    """How a script is watched; a task has settings of its own for that."""
    standby: Standby | None = None
    """Where ranks of a task begin, as far as processes wait there."""
    first_start: int = 0
    """The number of the first start of ranks here: earlier attempts of the launch have those before it."""


@dataclass(frozen=True)
class RankOutput:
    """The two files of one start of one rank."""

    out: Path
    err: Path


def rank_output(folder: Path, rank: int, start: int) -> RankOutput:
    """A later start of the same rank has files of its own: `rank-00003.out`, `rank-00003.restart-1.out`."""
    stem = f"rank-{rank:05d}" + (f".restart-{start}" if start else "")
    return RankOutput(folder / f"{stem}.out", folder / f"{stem}.err")


def failure_time(err: Path | None) -> float:
    """When a rank that has ended just now failed: a process may take long to exit after its last output."""
    now = time.monotonic()
    try:
        ago_s = time.time() - err.stat().st_mtime if err else 0.0
    except OSError:
        return now
    if err is None or not 0 < ago_s < LAST_WORDS_S:
        return now
    return now - ago_s if any(map(is_traceback, last_lines(err, LAST_LINES))) else now
