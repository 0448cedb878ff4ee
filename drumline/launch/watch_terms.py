"""What a launcher tells its ranks of the watch, in variables: their names, and how they are read.

Our own agent gives each start of ranks a folder, which is this node's alone, and all ranks of it one secret. A
script that knows nothing of Drumline (`launch --watch`) cannot say what it wants: there the rest is in variables too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drumline.errors import UsageError
from drumline.net.secrets import derived, secret_from

FOLDER = "DRUMLINE_WATCH_DIR"
NODES = "DRUMLINE_WATCH_NODES"
RUN = "DRUMLINE_WATCH_RUN"
ON_HANG = "DRUMLINE_WATCH_ON_HANG"
HANG_S = "DRUMLINE_WATCH_HANG_S"
ON_HANG_WORDS = ("restart", "stop", "report")
DEFAULT_ON_HANG = "restart"
# How to do without, for the user to read.
WITHOUT_WATCH = "--watch.sidecar off; a script: launch it without --watch"


def sidecar_secret(secret: str | None, *start: str) -> str | None:
    """What sidecars of one start prove themselves by; `start` names it, where all starts have one secret."""
    return None if secret is None else derived(secret, "sidecars", *start)


@dataclass(frozen=True)
class ScriptWatch:
    """What the user wants of the watch over a script."""

    run: str
    """The folder for diagnoses, in the place that a run folder has for a task."""
    on_hang: str = DEFAULT_ON_HANG
    hang_s: float | None = None
    """None: a script that only waits is never ended."""

    def variables(self) -> dict[str, str]:
        given = {RUN: self.run, ON_HANG: self.on_hang}
        return given if self.hang_s is None else {**given, HANG_S: f"{self.hang_s:g}"}


@dataclass(frozen=True, kw_only=True)
class WatchTerms:
    """What this rank was told; under another launcher, nothing."""

    folder: Path | None = None
    """The watch folder of this node and this start."""
    secret: str | None = field(default=None, repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    """By node: the address, and the port that is kept for its sidecar. Empty where there is one node, or another
    launcher."""
    run: Path | None = None
    """Only a script has it: where diagnoses go."""
    on_hang: str = DEFAULT_ON_HANG
    hang_s: float | None = None


def watch_terms_from(environment: Mapping[str, str]) -> WatchTerms:
    """The terms in these variables."""
    folder, run = environment.get(FOLDER), environment.get(RUN)
    on_hang = environment.get(ON_HANG, DEFAULT_ON_HANG)
    if on_hang not in ON_HANG_WORDS:
        raise UsageError(f"{ON_HANG} is {on_hang!r}, not one of {', '.join(ON_HANG_WORDS)}")
    return WatchTerms(
        folder=Path(folder) if folder else None,
        secret=sidecar_secret(secret_from(environment)),
        nodes=tuple(_node(word) for word in environment.get(NODES, "").split(",") if word),
        run=Path(run) if run else None,
        on_hang=on_hang,
        hang_s=_seconds(environment[HANG_S]) if HANG_S in environment else None,
    )


def _node(word: str) -> tuple[str, int]:
    address, _, port = word.rpartition(":")
    if not address or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"{NODES} has {word!r}, which is not ADDRESS:PORT")
    return address, int(port)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{HANG_S} is {text!r}, which is not a number of seconds")
    return seconds
