"""What our launcher gives each rank in its environment, and the failure record that a rank leaves
for its launcher.

When the user's command began, a file for each rank of each start (what a rank prints is for people,
what it writes there is for the launcher), a folder for the watchdog, and the settings of a script's
watchdog.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drumline.base.errors import Place
from drumline.base.job_secret import derived, secret_from
from drumline.base.untrusted import read_json, replace_text, whole_number

RESTARTED = "DRUMLINE_RESTARTED"
# Distinguishes one start of a node's ranks from any other.
NODE_START = "DRUMLINE_NODE_START"
LAUNCH_START = "DRUMLINE_LAUNCH_START"
"""When the launcher of this node began, in Unix seconds."""
LOGS_SHOWN = "DRUMLINE_LOGS_SHOWN"
"""Set if the launcher also shows what ranks other than 0 write to their logs in the run folder."""
FAILURE_FILE = "DRUMLINE_FAILURE_FILE"
SAVED_FILE = "DRUMLINE_SAVED_FILE"
GRACE_S = "DRUMLINE_GRACE_S"
ERROR_FILE = "DRUMLINE_ERROR_FILE"
RANK_FILE = "DRUMLINE_RANK_FILE"
"""Where a rank writes its number when the group of nodes has changed; the launcher marks its lines
with that."""
COMMAND_START = "DRUMLINE_COMMAND_START"
WATCH_FOLDER = "DRUMLINE_WATCH_DIR"
WATCH_NODES = "DRUMLINE_WATCH_NODES"
WATCH_RUN = "DRUMLINE_WATCH_RUN"
ON_HANG = "DRUMLINE_WATCH_ON_HANG"
HANG_S = "DRUMLINE_WATCH_HANG_S"
LOST_S = "DRUMLINE_WATCH_LOST_S"
LAUNCHER_LINK = "DRUMLINE_LAUNCHER_LINK"
"""A file in which the supervisor of a host writes from which hosts the launcher gets heartbeats
(LauncherLink)."""
DEFAULT_ON_HANG = "restart"
LOST_AFTER_S = 20
"""How long a host may be cut off before it is lost, as in `WatchConfig.lost_s`."""
"""NCCL's own variable and default."""
# How to run without the watchdog, for messages.
WITHOUT_WATCH = "--watch.sidecar off; a script: launch it without --watch"


def _leave(environment: Mapping[str, str], name: str, text: str) -> None:
    """Write the file that this variable names, if a launcher has set it."""
    if path := environment.get(name):
        with contextlib.suppress(OSError):
            replace_text(Path(path), text)


# How a rank failed


@dataclass(frozen=True)
class FailureRecord:
    """The first failure of the job, as one of its ranks knows it."""

    rank: int | None
    """The rank that failed first, which may not be the rank that writes this record."""
    step: int | None
    error: str
    is_own: bool
    """Whether the error is the rank's own, and not a result of another process's exit."""
    can_restart: bool
    """False: a restart would fail the same way."""
    full_disk: str = ""
    """The folder whose disk, or quota, is full, if that is why."""

    def repeats(self, before: FailureRecord | None) -> bool:
        """Whether the previous start failed in the same way, at the same step."""
        return self.is_own and self == before


def write_failure(environment: Mapping[str, str], record: FailureRecord) -> None:
    """Does nothing under another launcher."""
    _leave(environment, FAILURE_FILE, json.dumps(asdict(record)))


def read_failure(path: Path) -> FailureRecord | None:
    """The record; None: the rank could not write it (it was killed), or is a script's."""
    return read_json(FailureRecord, path)


# Which rank a process is now


def write_rank(environment: Mapping[str, str], rank: int) -> None:
    """Does nothing where no launcher shows the lines of ranks."""
    _leave(environment, RANK_FILE, str(rank))


def read_rank(path: Path) -> int | None:
    """None: the number is the one that the launcher gave."""
    try:
        return whole_number(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None


# How a rank was preempted


def grace_from(environment: Mapping[str, str]) -> float | None:
    """How many seconds after a SIGTERM the launcher kills this rank; None: another launcher, which
    does not say."""
    grace_s = environment.get(GRACE_S)
    return float(grace_s) if grace_s else None


def note_saved(environment: Mapping[str, str]) -> None:
    """Report to the launcher that the preempted run has saved: the same command resumes it,
    whatever ends this rank."""
    _leave(environment, SAVED_FILE, "")


# How a command failed


@dataclass(frozen=True)
class ErrorRecord:
    """What a command printed last, for the Python program that has started it (`python_api.py`)."""

    what: str
    next_step: str | None
    place: Place
    details: str = ""
    """The traceback of an error that is not ours."""


def write_error(environment: Mapping[str, str], record: ErrorRecord) -> None:
    """Does nothing in a command that a user has typed. A later failure, after a restart, replaces
    an earlier one."""
    _leave(environment, ERROR_FILE, json.dumps(asdict(record)))


def read_error(path: Path) -> ErrorRecord | None:
    """None: the command could not write it."""
    return read_json(ErrorRecord, path)


# The watchdog


@dataclass(frozen=True)
class ScriptWatch:
    run: str
    """The folder for diagnoses; a task uses its run folder."""
    on_hang: str = DEFAULT_ON_HANG
    hang_s: float | None = None
    """None: a script that may still continue is never ended."""
    lost_s: float = float(LOST_AFTER_S)
    """How long an unreachable host is waited for."""

    def variables(self) -> dict[str, str]:
        variables = {WATCH_RUN: self.run, ON_HANG: self.on_hang, LOST_S: f"{self.lost_s:g}"}
        if self.hang_s is not None:
            variables[HANG_S] = f"{self.hang_s:g}"
        return variables


@dataclass(frozen=True, kw_only=True)
class LauncherLink:
    """Which hosts of a job the launcher reaches: with it, the end of a cut link that is cut off is
    known."""

    is_cut_off: bool = False
    """Whether this host gets no heartbeat from the launcher."""
    silent_nodes: tuple[int, ...] = ()
    """The nodes from which the launcher gets no heartbeat, as it last reported."""
    num_nodes: int = 0

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(asdict(self)))


def read_launcher_link(path: str) -> LauncherLink | None:
    """None: no launcher over ssh has started this job, or all hosts send heartbeats so far."""
    return read_json(LauncherLink, Path(path)) if path else None


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What the launcher set for this rank's watchdog; under another launcher, nothing."""

    folder: Path | None = None
    """The watch folder of this node and this start."""
    secret: str | None = field(default=None, repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    """By node: the address, and the port that is reserved for its sidecar; empty on a single
    node."""
    run: Path | None = None
    """Only for a script: where diagnoses go."""
    on_hang: str = DEFAULT_ON_HANG
    hang_s: float | None = None
    lost_s: float = float(LOST_AFTER_S)
    launcher_link: str = ""
    """Where the supervisor of this host writes a LauncherLink; empty: there is none."""


def sidecar_secret(secret: str | None, *start: str) -> str | None:
    """The secret of the sidecars of one start; `start` identifies it, where all starts share one
    secret."""
    return None if secret is None else derived(secret, "sidecars", *start)


def _watch_nodes(endpoints: str) -> Iterator[tuple[str, int]]:
    for endpoint in filter(None, endpoints.split(",")):
        address, _, port = endpoint.rpartition(":")
        yield address, int(port)


def watch_settings_from(environment: Mapping[str, str]) -> WatchSettings:
    """Only our own launcher sets these variables."""
    folder = environment.get(WATCH_FOLDER)
    run = environment.get(WATCH_RUN)
    hang_s = environment.get(HANG_S)
    return WatchSettings(
        folder=Path(folder) if folder else None,
        secret=sidecar_secret(secret_from(environment)),
        nodes=tuple(_watch_nodes(environment.get(WATCH_NODES, ""))),
        run=Path(run) if run else None,
        on_hang=environment.get(ON_HANG, DEFAULT_ON_HANG),
        hang_s=float(hang_s) if hang_s else None,
        lost_s=float(environment.get(LOST_S, LOST_AFTER_S)),
        launcher_link=environment.get(LAUNCHER_LINK, ""),
    )
