"""The watch folder of a node: files that its agent, its ranks and their sidecar exchange.

It is in memory if that is large enough, because the run folder's storage may hang. The guard
removes it when the job is over; if the guard was killed too, the next job of the same user does. A
lock on a file in it, which the kernel releases with the last process that held it, shows whether it
is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from drumline.base.untrusted import read_json, replace_text, whole_number

DIAGNOSIS = "diagnosis.json"
SIDECAR = "sidecar.pid"
REPORTED = "reported"
ENDING = "ending.json"
FURTHEST_STEP = "furthest-step"
"""The furthest step of the ranks of this node, which the sidecar writes about once a second."""

# How long the sidecar may take to report why a rank has exited; it gathers evidence first.
DIAGNOSIS_S = 5.5
POLL_S = 0.05
MEMORY = Path("/dev/shm")  # noqa: S108 (mkdtemp makes a folder of our own in it)
PREFIX = "drumline-watch-"
START = "start-"
IN_USE = "in-use"

# For heartbeats, stacks and flight recorders of a node. Containers often have a small /dev/shm,
# which loaders fill.
NEEDED_BYTES = 4 << 20


@dataclass(frozen=True)
class SidecarDiagnosis:
    """The part of a diagnosis that a launcher needs."""

    alarm: str
    """`hang` or `failure`."""

    action: str
    """`restart`, `stop`, `report` or `none`."""

    sentence: str
    was_printed: bool = False
    """Whether it was already printed on this screen."""

    what: str = ""
    """The sentence without the alarm, and without what to do."""

    rank: int | None = None
    """The rank that it blames; None: the whole host."""

    host: str = ""
    is_ranks_error: bool = False
    """Whether it only repeats the error of that rank, which prints it with its traceback."""

    @property
    def is_hang(self) -> bool:
        return self.alarm == "hang"

    @property
    def is_final(self) -> bool:
        return self.action == "stop"

    def explains_more(self, rank_code: int, *, is_task: bool) -> bool:
        """Whether it explains more than the error that a rank with this exit code has printed."""
        return not self.is_ranks_error or self.is_hang or rank_code < 0 or not is_task


@dataclass(frozen=True)
class Ending:
    """How drumline itself ends the ranks of a node: the kernel does not say who sent a signal."""

    began_s: float
    """When it first asked them to exit, by the monotonic clock."""

    grace_s: float
    """After how many seconds the ranks that are left are killed."""

    by: str = "launcher"
    """Which part of drumline does it."""

    why: str = ""
    """Empty: another rank has failed, or the job is ended."""

    @property
    def kills_at_s(self) -> float:
        """When the ranks that are left are killed."""
        return self.began_s + self.grace_s


class WatchFolder:
    """The folders of one job on this node: one for each start of its ranks."""

    def __init__(self, job: str) -> None:
        self.root: Path | None = None
        """None if no folder could be created: then each start of ranks makes its own."""

        self._lock: int | None = None

        with contextlib.suppress(OSError):
            self.root = make_memory_folder(job[:8])
            self._lock = hold(self.root)

        self.current: Path | None = None
        self._written: set[int] = set()

    def close(self) -> None:
        """From here on the next job may remove it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, start: int) -> Path | None:
        """A new folder for the ranks that are about to start."""
        self._written = set()
        self.current = None
        if self.root is None:
            return None

        # The folder of the previous start is kept: its sidecar may still be writing.
        shutil.rmtree(self.root / f"{START}{start - 2}", ignore_errors=True)
        folder = self.root / f"{START}{start}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
            self.current = folder

        return self.current

    def note_exit(self, rank: int, code: int) -> None:
        """Record how a rank exited: its exit code, or minus the signal. Only the first call for a
        rank counts."""
        if self.current is None or rank in self._written:
            return

        self._written.add(rank)
        with contextlib.suppress(OSError):
            replace_text(self.current / f"exit-{rank:05d}", f"{code}\n")

    def note_ending(self, grace_s: float, *, why: str = "") -> None:
        """Record that ranks are ended from here on, and that those that are left after this time
        are killed."""
        if self.current is not None:
            note_ending(self.current, Ending(time.monotonic(), grace_s, why=why))

    def diagnosis(self, deadline: float = 0.0) -> SidecarDiagnosis | None:
        """The sidecar's diagnosis of this start, if it has ended ranks. Waits while the sidecar
        runs, until the deadline (monotonic)."""
        return None if self.current is None else wait_for_diagnosis(self.current, deadline)

    def furthest_step(self) -> int:
        """The furthest step of the ranks of this start; 0: unknown."""
        if self.current is None:
            return 0
        return read_json(int, self.current / FURTHEST_STEP) or 0

    def has_sidecar(self) -> bool:
        """Whether the sidecar of this start runs."""
        return self.current is not None and has_sidecar(self.current)


def start_number(folder: Path) -> int:
    """Which start of the ranks has this watch folder, from 0; 0 also where no launcher made it."""
    return whole_number(folder.name.removeprefix(START)) or 0


def wait_for_diagnosis(folder: Path, deadline: float) -> SidecarDiagnosis | None:
    """Waits while the sidecar of this watch folder runs, until the deadline (monotonic). None: it
    has not diagnosed anything that has ended a rank."""
    while True:
        is_last_try = time.monotonic() >= deadline or not has_sidecar(folder)
        diagnosis = read_json(SidecarDiagnosis, folder / DIAGNOSIS)
        if diagnosis is not None and has_ended_ranks(diagnosis.alarm, diagnosis.action):
            return diagnosis
        if is_last_try:
            return None
        time.sleep(POLL_S)


def has_ended_ranks(alarm: str, action: str) -> bool:
    """Not a stall, nor a hang that was only reported."""
    return alarm == "failure" or (alarm == "hang" and action != "report")


def note_ending(folder: Path, ending: Ending) -> None:
    """Ranks that are being killed already are not killed for another reason."""
    earlier = read_ending(folder)
    if earlier is not None and earlier.kills_at_s <= ending.began_s:
        return

    if earlier is not None and earlier.began_s < ending.began_s:
        grace_s = ending.kills_at_s - earlier.began_s
        ending = replace(ending, began_s=earlier.began_s, grace_s=grace_s)

    with contextlib.suppress(OSError):
        replace_text(folder / ENDING, json.dumps(asdict(ending)))


def read_ending(folder: Path) -> Ending | None:
    """None: drumline has not ended the ranks of this folder."""
    return read_json(Ending, folder / ENDING)


def has_sidecar(folder: Path) -> bool:
    """Whether the sidecar of this folder runs."""
    try:
        os.kill(int((folder / SIDECAR).read_text(encoding="utf-8")), 0)
    except (OSError, ValueError):
        return False

    return True


def claim_report(folder: Path) -> bool:
    """Whether the caller is to report why this start failed: the first one that asks. The launcher
    does not wait for a sidecar that is still starting, and both would report a rank that is killed
    then."""
    try:
        (folder / REPORTED).touch(mode=0o600, exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)

    return True


# Folders in memory


def make_memory_folder(job: str = "") -> Path:
    """Only for this user: in memory if that is large enough, otherwise in the temporary folder.
    OSError: in neither."""
    prefix = f"{PREFIX}{job}-" if job else PREFIX
    folder = None
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY).free >= NEEDED_BYTES:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY))

    folder = folder or Path(tempfile.mkdtemp(prefix=prefix))
    _remove_abandoned(folder.parent)

    return folder


def hold(folder: Path) -> int:
    """Mark it as in use until the descriptor is closed here and in all forked processes."""
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except FileNotFoundError:
        # The file is locked before it gets its name: otherwise it would look abandoned for a
        # moment.
        nameless = folder / f".{IN_USE}"
        descriptor = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        nameless.rename(folder / IN_USE)

    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of this user that no process holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        # a folder without the file is from another version
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue

            descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # BlockingIOError: it is in use
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)

            shutil.rmtree(folder, ignore_errors=True)
