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
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError
from drumline.base.untrusted import (
    check_own_file,
    check_own_folder,
    flush_folder,
    from_json,
    open_append,
    parse_json,
    read_regular,
    replace_text,
    replacing,
)
from drumline.launch.node_plan import NodePlan, Program
from drumline.net.frames import encode

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
NAME_FORM = "letters a to z, digits and dashes"
STARTING = "starting"
RUNNING = "running"
WAITING = "waiting"
ENDED = "ended"


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
    """The host name of this machine: a folder may be visible on several."""
    hosts: tuple[str, ...]
    """All hosts of the job, by node rank, as the launch calls them."""
    launched_at: float
    cwd: str
    keep_going: bool
    node: NodePlan
    program: Program
    frame: dict[str, Any] = field(repr=False)
    """For the supervisor of an attempt; holds the secret."""
    variables: dict[str, str] = field(repr=False)
    """The environment in which ssh started us."""


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


class JobFolder:
    """One node's folder of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = path / "frames.jsonl"
        """What happened, as a supervisor reports it."""
        self.log = path / "keeper.log"
        self._spec = path / "spec.json"
        self._state = path / "state.json"
        self._stop = path / "stop.json"
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
        self.check()
        for path in (self._spec, self._lock):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with open_append(self._spec) as file:
            file.write(json.dumps(asdict(spec)).encode())
            os.fsync(file.fileno())
        self.write_state(JobState())
        flush_folder(self.path)

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
        return from_json(JobState, parse_json(read_regular(self._state)))

    def write_state(self, state: JobState) -> None:
        """It is on disk when this returns: after a power failure the job continues from it."""
        with replacing(self._state) as file:
            file.write(json.dumps(asdict(state)).encode())
            file.flush()
            os.fsync(file.fileno())

    def note(self, kind: str, **content: Any) -> None:
        """Add a frame to those that `drumline attach` shows."""
        with suppress(OSError), open_append(self.frames) as file:
            file.write(encode({"kind": kind, **content}) + b"\n")

    def ask_to_stop(self, *, save: bool) -> None:
        replace_text(self._stop, json.dumps({"save": save}))

    def stop_request(self) -> bool | None:
        """Whether the job is to save; None: it is not asked to stop."""
        try:
            return bool(parse_json(read_regular(self._stop))["save"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def forget_secrets(self) -> None:
        """Of a job that has ended: its secret, and the values of its environment."""
        spec = self.spec()
        frame = {**spec.frame, "secret": "", "environment": {}}
        without_secrets = replace(spec, frame=frame, variables={})
        with replacing(self._spec) as file:
            file.write(json.dumps(asdict(without_secrets)).encode())

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether this process holds the job while the block runs: False if its keeper does."""
        with self._locked(fcntl.LOCK_EX) as is_held:
            yield is_held

    def is_kept(self) -> bool:
        """Whether a keeper holds it. Any number of processes may ask at once."""
        with self._locked(fcntl.LOCK_SH) as is_free:
            return not is_free

    @contextmanager
    def _locked(self, kind: int) -> Iterator[bool]:
        lock = os.open(self._lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_locked = True
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                is_locked = False
            yield is_locked
        finally:
            os.close(lock)


def folders_of(jobs: Path, name: str | None = None) -> list[JobFolder]:
    """Those of this user's jobs that have a node on this machine; of one job, if it is named."""
    if name is not None and (wrong := wrong_job_name(name)):
        raise UsageError(wrong, next_step="drumline jobs lists them")

    folders = []
    for path in sorted(jobs.glob(f"{name or '*'}/node-*")):
        folder = JobFolder(path)
        with suppress(OSError, ValueError):
            spec = folder.spec()
            if spec.machine == socket.gethostname() and spec.name == path.parent.name:
                folders.append(folder)
    return folders
