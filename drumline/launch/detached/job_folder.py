"""The folder of a detached job on one of its nodes, `drumline/jobs/NAME/node-K` in this user's
state folder: what runs, how far it is, and what happened.

It holds the job's secret, so only this user may read it. Home folders may be shared between hosts:
each node has a folder of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError
from drumline.base.untrusted import (
    check_own_file,
    check_own_folder,
    descriptor_of,
    flush_folder,
    from_json,
    open_append,
    parse_json,
    read_regular,
    replacing,
)
from drumline.launch.hosts import Host, wrong_name
from drumline.launch.keep_going import FULL
from drumline.launch.node_plan import NodePlan, Program
from drumline.net.frames import encode

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
NAME_FORM = "letters a to z, digits and dashes"
STARTING = "starting"
RUNNING = "running"
WAITING = "waiting"
ENDED = "ended"
DOWN = "down"
"""The state of a job whose keeper does not run, though the job has not ended."""
MACHINE_ID = Path("/etc/machine-id")
# How long a job that has ended is kept.
RETENTION_S = 30 * 86400.0


def wrong_job_name(name: str) -> str | None:
    """What is wrong with the name of a job; None: nothing. It becomes a part of paths, and of the
    names of units."""
    if NAME.fullmatch(name):
        return None
    return f"{name!r} is not a job's name ({NAME_FORM})"


def jobs_folder(environment: Mapping[str, str]) -> Path:
    """Of all jobs of this user on this machine."""
    state_home = Path(environment.get("XDG_STATE_HOME") or "")
    if not state_home.is_absolute():
        state_home = Path.home() / ".local" / "state"
    return state_home / "drumline" / "jobs"


@dataclass(frozen=True)
class JobSpec:
    """What a node of the job runs, as the launch sent it."""

    name: str
    machine: str
    """The host name of this machine when the job was launched."""
    hosts: tuple[str, ...]
    """All hosts of the job, by node rank, as the launch calls them."""
    launched_at: float
    """In Unix seconds."""
    cwd: str
    """The folder in which it runs."""
    keep_going: bool
    node: NodePlan
    program: Program
    frame: dict[str, Any] = field(repr=False)
    """For the supervisor of an attempt; holds the secret."""
    variables: dict[str, str] = field(repr=False)
    """The environment in which ssh started us."""
    machine_id: str = ""
    """A folder may be visible on several machines, and a machine may start under another name."""

    @property
    def is_json(self) -> bool:
        """Whether what is printed is to be JSON objects."""
        return bool(self.frame.get("is_json"))


@dataclass(frozen=True)
class JobState:
    """How far this node is."""

    state: str = STARTING
    why: str = ""
    """Why it waits or has ended."""
    code: int | None = None
    """The exit code of an ended job."""
    attempt: str = ""
    """The DRUMLINE_JOB of the processes of the last attempt."""
    first_start: int = 0
    """Of the next attempt."""
    restarts_left: int | None = None
    """As last counted; None: all."""
    reached_step: int = 0
    counted_step: int = 0
    stops_with_save: bool | None = None
    """None: it was not asked to stop."""


@dataclass(frozen=True)
class JobRecord:
    """A job as one of its nodes shows it."""

    name: str
    hosts: tuple[str, ...]
    node: NodePlan
    program: Program
    state: str
    why: str
    code: int | None
    step: int
    """The furthest that is known; 0: none."""
    since: float
    """In Unix seconds."""
    logs: str
    """The folder of its logs there."""
    run: str
    """Its run folder; empty: a script has none."""
    is_json: bool

    def host(self, rank: int) -> Host:
        """As the launch called it; raises UsageError if that is no name of a host."""
        if wrong := wrong_name(self.hosts[rank]):
            raise UsageError(wrong, next_step="name the job's hosts with --hosts")
        return Host(self.hosts[rank])


class JobFolder:
    """One node's folder of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = path / "frames.jsonl"
        """What happened, as a supervisor reports it."""
        self.log = path / "keeper.log"
        self._spec = path / "spec.json"
        self._state = path / "state.json"
        self._lock = path / "keeper.lock"

    @property
    def unit(self) -> str:
        """The name under which the system starts its keeper."""
        return f"drumline-{self.path.parent.name}-{self.path.name}"

    def create(self, spec: JobSpec) -> None:
        """FileExistsError: there is such a job."""
        for folder in (self.path.parent.parent, self.path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own_folder(self.path.parent.parent)
        self.path.mkdir(mode=0o700)
        try:
            for path in (self._lock, self.frames):
                path.touch(mode=0o600, exist_ok=False)
            self.write_state(JobState())
            # the last one: from here on the job is listed
            self._write(self._spec, spec)
            flush_folder(self.path)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """The folder of this node, and that of the job after the last one."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it has other nodes
            self.path.parent.rmdir()

    def check(self) -> None:
        """An OSError if others could have written to it."""
        check_own_folder(self.path)
        mode = self.path.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(0, f"others can write to it (mode {stat.S_IMODE(mode):o})")

    def spec(self) -> JobSpec:
        """Raises OSError or ValueError if it is not there, not ours, or damaged."""
        self.check()
        check_own_file(self._spec)
        return from_json(JobSpec, parse_json(read_regular(self._spec)))

    def state(self) -> JobState:
        """Raises OSError or ValueError if it cannot be read."""
        return from_json(JobState, parse_json(read_regular(self._state)))

    def ended_at(self) -> float | None:
        """In Unix seconds; None: it has not ended."""
        with suppress(OSError, ValueError):
            if self.state().state == ENDED and not self.has_keeper():
                return self._state.stat().st_mtime
        return None

    def write_state(self, state: JobState) -> None:
        """It is on disk when this returns: after a power failure the job continues from it."""
        self._write(self._state, state)

    def _write(self, path: Path, content: JobSpec | JobState) -> None:
        """On a full disk the blocks that the file has are written again."""
        text = json.dumps(asdict(content)).encode()
        try:
            with replacing(path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in FULL or not path.exists():
                raise
            with os.fdopen(descriptor_of(path, os.O_RDWR), "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, len(text))
                file.write(text)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())

    def note(self, kind: str, **content: Any) -> None:
        """Add a frame to those that `drumline attach` shows."""
        with suppress(OSError), open_append(self.frames) as file:
            file.write(encode({"kind": kind, **content}) + b"\n")

    def forget_secrets(self) -> None:
        """Of a job that has ended: its secret, and the values of its environment."""
        spec = self.spec()
        frame = {**spec.frame, "secret": "", "environment": {}}
        self._write(self._spec, replace(spec, frame=frame, variables={}))

    def has_keeper(self) -> bool:
        """Whether a keeper holds it. Any number of processes may ask at once."""
        with self.held(fcntl.LOCK_SH) as is_free:
            return not is_free

    @contextmanager
    def held(self, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
        """Whether this process holds the job while the block runs: False if its keeper does."""
        # A network disk takes a lock only of a file that is open for writing.
        mode = os.O_RDWR if os.access(self._lock, os.W_OK) else os.O_RDONLY
        lock = os.open(self._lock, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_held = True
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                is_held = False
            yield is_held
        finally:
            os.close(lock)


def machine_id() -> str:
    """Of this machine; empty: it has none, or one that changes with each start."""
    with suppress(OSError):
        if not os.path.ismount(MACHINE_ID):
            return MACHINE_ID.read_text(encoding="ascii").strip()
    return ""


def is_of_this_machine(spec: JobSpec) -> bool:
    """By the id of the machine, or by its name where one of both has no id."""
    this_id = machine_id()
    if spec.machine_id and this_id:
        return spec.machine_id == this_id
    return spec.machine == socket.gethostname()


def folders_of(
    jobs: Path, name: str | None = None, problems: list[str] | None = None
) -> list[JobFolder]:
    """Those of this user's jobs that have a node on this machine; of one job, if it is named.
    `problems`: gets those that cannot be read."""
    if name is not None and (wrong := wrong_job_name(name)):
        raise UsageError(wrong, next_step="drumline jobs lists them")

    folders = []
    for path in sorted(jobs.glob(f"{name or '*'}/node-*")):
        folder = JobFolder(path)
        try:
            spec = folder.spec()
            if spec.name == path.parent.name and is_of_this_machine(spec):
                folders.append(folder)
        except FileNotFoundError:  # it is being made, or removed
            continue
        except (OSError, ValueError) as error:
            if problems is not None:
                problems.append(unreadable(path, error))
    return folders


def unreadable(path: Path, error: Exception) -> str:
    """The warning about a folder, for whoever lists jobs."""
    return f"{path} cannot be read: {error}; delete it if no job runs from it"


def remove_old(jobs: Path) -> None:
    """The folders of jobs that have ended long ago, also on other machines, which may be gone."""
    for path in jobs.glob("*/node-*"):
        folder = JobFolder(path)
        ended_at = folder.ended_at()
        if ended_at is not None and time.time() - ended_at > RETENTION_S:
            folder.remove()
