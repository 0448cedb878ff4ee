"""The run folder, its paths and its lock, and how an earlier run is moved aside.

config.toml, environment.json, ledger.jsonl
events/rank-NNNNN.jsonl, logs/rank-NNNNN.log
checkpoints/step-NNNNNNNN/
settings-history.jsonl      which settings changed at which step, if any did
preempted.json              until a preempted run is resumed; scripts that requeue jobs may check for it
step-trial.txt              the kind of step that `--train.step auto` is trying
watch/launch.json           the launch, kept over restarts
diagnoses/NNNN-CAUSE.json   diagnoses of the sidecars
media/NAME-NNNNNNNN.png     images that hooks log, by step
trace/rank-NNNNN.jsonl      with log.trace
profile/                    with log.profile: runs/profile_files.py
trackers/NAME.json          the id of the tracker's run, with log.trackers
wandb/, tensorboard/        of those trackers
report.html                 written at the end
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drumline.base.errors import TrainingError, UsageError, did_you_mean
from drumline.base.untrusted import (
    check_own_file,
    check_own_folder,
    descriptor_of,
    make_own_folder,
    open_regular,
    replace_text,
)

MAX_LOCK_BYTES = 1024
# struct flock: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi0q")


class RunFolder:
    """The paths in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.settings_history = path / "settings-history.jsonl"
        self.environment_file = path / "environment.json"
        self.ledger = path / "ledger.jsonl"
        self.trial_file = path / "step-trial.txt"
        self.preempted_file = path / "preempted.json"
        self.diagnoses = path / "diagnoses"
        self.launch_file = path / "watch" / "launch.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.media = path / "media"
        self.trackers = path / "trackers"
        self.wandb = path / "wandb"
        self.events = path / "events"
        self.traces = path / "trace"

    def event_file(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def trace_file(self, rank: int) -> Path:
        return self.traces / f"rank-{rank:05d}.jsonl"

    def make(self) -> None:
        """Create it. A folder of another user is refused: with links they could redirect writes and
        deletions."""
        with self.refusing():
            make_own_folder(self.path, follow_links=True)  # the user named it
            for folder in (self.events, self.logs, self.checkpoints):
                make_own_folder(folder)
            for folder in (
                self.diagnoses,
                self.launch_file.parent,
                self.traces,
                self.tensorboard,
                self.media,
                self.trackers,
                self.wandb,
            ):
                if os.path.lexists(folder):
                    check_own_folder(folder)

            for file in (
                self.ledger,
                self.settings_history,
                *self.events.iterdir(),
                *self.logs.iterdir(),
            ):
                check_own_file(file)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = Path(str(error.filename or self.path))
            part = "" if where == self.path else f" ({where.name})"
            raise UsageError(
                f"the run folder {self.path} cannot be {'used' if self.path.is_dir() else 'made'}: "
                f"{error.strerror}{part}",
                next_step="choose a folder of your own with --run DIR",
            ) from error


def default_run(task: str) -> Path:
    """The folder of a run whose user named none."""
    return Path("runs") / run_name(task)


def run_name(task: str) -> str:
    """`digits`, or the class of a task of the user's own."""
    return task.rpartition(":")[2]


def set_aside(folder: RunFolder) -> Path | None:
    """Rename an earlier run to a free name. Nothing is deleted, and the folder of a running job is
    not moved."""
    path = folder.path.resolve()
    if not path.is_dir():
        return None
    # a folder of another user, or a link of one to a folder of ours
    with folder.refusing():
        check_own_folder(folder.path, follow_links=True)
    first = aside = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 0
    with locked(folder):
        while aside.exists():
            number += 1
            aside = first.with_name(f"{first.name}-{number}")
        path.rename(aside)
    # as the user wrote it
    return folder.path.with_name(aside.name) if folder.path.name else aside


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Keep a second job out of this folder. The lock ends with the process, however it exits."""
    with folder.refusing():
        descriptor = descriptor_of(folder.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace") as file:
        try:
            # Not flock, which DataLoader workers would inherit and might hold after the rank has
            # exited.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UsageError(
                    f"the run folder {folder.path} cannot be locked: {error.strerror}",
                    next_step="put it on a file system with locks, with --run DIR",
                ) from error
            file.seek(0)
            raise UsageError(
                f"another job ({file.read(MAX_LOCK_BYTES).strip() or 'unknown'}) is training in {folder.path}",
                next_step="wait for it, or give this one a folder of its own with --run DIR",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def job_at_work(folder: RunFolder) -> str | None:
    """The job that is training in this folder now, as `locked` recorded it, or None. It takes no
    lock, which would keep out a job that starts at this moment."""
    try:
        with open_regular(folder.path / ".lock") as file:
            lock = fcntl.fcntl(file, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_RDLCK, 0, 0, 0, 0))
            if _FLOCK.unpack(lock)[0] == fcntl.F_UNLCK:
                return None
            return file.read(MAX_LOCK_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that a full disk never leaves a part of it, or no file."""
    with writing_to(path):
        replace_text(path, text)


@contextmanager
def writing_to(path: Path, *, instead: str = "use another --run DIR") -> Iterator[None]:
    """An error in writing this file ends the run, with what to do."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path} could not be written: {error.strerror}",
            next_step=f"free some space there, or {instead}",
        ) from error


def find_run(run: Path) -> Path:
    """This folder if it is a run folder; otherwise an error that names the run folders nearby."""
    if is_run(run):
        return run
    if run.exists():
        next_step = "give the folder of --run"
        if inside := _runs_in(run):
            next_step = f"give one of the runs in it: {', '.join(inside)}"
        raise UsageError(
            f"{run} is not a run folder: it has no config.toml, events or checkpoints",
            next_step=next_step,
        )
    hint = ""
    if beside := _runs_in(run.parent):
        hint = f"; {did_you_mean(run.name, beside, known_as='known runs here')}"
    raise UsageError(
        f"there is no run folder {run}{hint}", next_step="give the folder that `--run` named"
    )


def _runs_in(folder: Path) -> list[str]:
    """Their names, in order; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if is_run(path))


def is_run(path: Path) -> bool:
    """Whether a folder has what a run writes first."""
    folder = RunFolder(path)
    return folder.config_file.is_file() or folder.events.is_dir() or folder.checkpoints.is_dir()
