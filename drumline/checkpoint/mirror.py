"""Copies the checkpoints of a run to an object store, in a thread, after each save; and restores a
run from there.

One upload runs at a time; when saves come faster, the newest is next. The manifest is uploaded
last: after the store has confirmed every other object, and after the ledger and the events, which
must not lack a step of a checkpoint. A store that fails never stops the run: there is a warning,
and it is tried again after growing pauses, and at each save. Retention is the same on both sides; a
local checkpoint is removed only after it, or a newer one, was verified in the store: if the disk
fills up meanwhile, a save fails, as without a mirror.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from drumline.base.errors import CheckpointError, DrumlineError, log
from drumline.base.text import duration, file_size, join_names
from drumline.base.untrusted import open_regular, read_regular
from drumline.checkpoint.mirrored_run import (
    CHECKPOINTS,
    RUN_FILES,
    RUN_FOLDERS,
    MirroredRun,
    is_own_name,
    object_name,
    piece_name,
)
from drumline.checkpoint.retention import Retention, complete_checkpoints, prune, to_keep
from drumline.runs import catalog, manifest
from drumline.runs.manifest import FileRecord, Manifest
from drumline.storage.backends import PIECE_BYTES, StoreError

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 120.0
POLL_S = 1.0
PROGRESS_S = 10.0


class _ClosedError(Exception):
    """The run has ended, and waits no longer."""


class Mirror:
    """Of one run folder, on rank 0."""

    def __init__(
        self,
        run: MirroredRun,
        folder: Path,
        *,
        retention: Retention,
        note: Callable[[str], None],
        mirrored: Callable[[int], None],
        alive: Callable[[], None],
    ) -> None:
        """`mirrored` is called with the newest step in the store, -1: none, at the start and when
        it may have changed; `alive` while the run waits for its end."""
        self._run = run
        self._store = run.store
        self._folder = folder
        self._root = folder / CHECKPOINTS
        """The checkpoints of the run."""

        self._retention = retention
        self._note = note
        self._report_newest = mirrored
        mirrored(-1)
        self._alive = alive

        self._complete: dict[int, Manifest] = {}
        """In the store, by step."""

        self._newest_safe = -1
        """The newest step that is complete here and there."""

        self._id = ""
        """Of the run, once the mirror is claimed for it."""

        self._sent: dict[str, tuple[int, int]] = {}
        """By small file: its size and time when it was uploaded."""

        self._num_pieces: dict[str, int] = {}
        """By file that only grows: how many whole pieces are uploaded."""

        self._doing = ""
        """What is being uploaded, for people; empty: nothing is."""

        self._failure = ""
        """Why the last attempt failed; empty: it did not."""

        self._can_recover = True
        """Whether waiting may help after a failure."""

        self._has_begun = False
        """Whether what an earlier run left unfinished was deleted."""

        self._has_given_up = False
        """Whether the end of the run has stopped waiting; nothing is reported after that."""

        self._is_closed = False

        self._pruning = threading.Lock()
        self._changing = threading.Lock()
        """Held while both events are changed together."""

        self._wake = threading.Event()
        """Set when there may be something to upload."""

        self._is_current = threading.Event()
        """Set when all is in the store."""

        # A daemon: an endpoint that does not answer must not keep a run that has ended from
        # exiting.
        self._thread = threading.Thread(target=self._work, name="drumline-mirror", daemon=True)

    def start(self) -> None:
        """Have everything uploaded that is not in the store."""
        with self._changing:
            self._is_current.clear()
            self._can_recover = True  # until this attempt fails, too
            self._wake.set()

        if not self._thread.is_alive():
            self._thread.start()

    def saved(self, newest: Path) -> None:
        """A checkpoint is complete: have it uploaded, and remove local ones that are not kept.
        Never waits for the store."""
        self.start()
        self._prune_local(newest)

    def finish(self, limit_s: float) -> None:
        """Wait until everything is uploaded, and report how far it is. After this time, or if the
        store refuses, report what is not mirrored."""
        if self._has_given_up:
            return

        self.start()  # for the newest events
        reported_at = time.monotonic()
        deadline = reported_at + limit_s

        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if self._is_current.wait(min(POLL_S, PROGRESS_S, left_s)):
                return

            self._alive()
            state = self._failure or self._doing or "listing it"
            if time.monotonic() >= deadline or not self._can_recover:
                self._give_up(state)
                return

            if time.monotonic() - reported_at >= PROGRESS_S:
                self._report(f"waiting for the mirror {self._store}: {state}")
                reported_at = time.monotonic()

    def _give_up(self, state: str) -> None:
        """Warn about what is not mirrored."""
        self._has_given_up = True
        steps = sorted(self._missing(complete_checkpoints(self._root)))
        missing = f"the checkpoint of step {join_names(steps)}" if steps else "the end of the run"
        log.warning(f"{missing} is not in the mirror {self._store}: {state}")

    def close(self, limit_s: float) -> None:
        """Upload the last events, and end the thread."""
        self.finish(limit_s)
        self._is_closed = True
        self._wake.set()
        if not self._has_given_up:
            self._thread.join()

    def _work(self) -> None:
        """The thread: synchronize when something has changed, or again after a failure."""
        pause_s = 0.0
        while True:
            self._wake.wait(pause_s or None)
            self._wake.clear()
            if self._is_closed:
                return

            try:
                self._synchronize()
            except _ClosedError:
                return
            except Exception as error:  # whatever it is, it must not end the run
                self._report_failure(error)
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                continue

            if self._failure:
                self._report(f"the mirror {self._store} works again")

            self._failure = ""
            self._can_recover = True
            pause_s = 0.0

            with self._changing:
                if not self._wake.is_set():
                    self._is_current.set()

    def _report(self, message: str) -> None:
        """Add a note to the run's events."""
        if not self._has_given_up:  # the run may have closed its files
            self._note(message)

    def _report_failure(self, error: Exception) -> None:
        """Once, until it works again."""
        if isinstance(error, DrumlineError):
            what = error.what
            self._can_recover = getattr(error, "may_pass", False)
        else:
            what = f"{type(error).__name__}: {error}"
            self._can_recover = True

        if not self._failure and not self._has_given_up:
            failed = CheckpointError(
                f"the mirror failed: {what}; training continues, and checkpoints stay here until it works",
                next_step=getattr(error, "next_step", None),
            )
            log.warning(failed)

        self._failure = what

    def _synchronize(self) -> None:
        """Upload what is missing, and remove what is not kept, here and in the store."""
        # each time: someone else may have deleted some
        mirrored = self._run.checkpoints()
        self._complete = mirrored.complete

        if not self._id:
            is_empty = not (mirrored.complete or mirrored.corrupt)
            self._id = self._run.claim(self._folder, is_empty=is_empty, uploads=True)

        self._check()
        if not self._has_begun:
            with suppress(StoreError):  # a right that nothing else needs
                self._store.delete_unfinished(CHECKPOINTS)
            self._has_begun = True

        local = complete_checkpoints(self._root)
        while missing := self._missing(local):
            newest = max(missing)
            self._upload(newest, local[newest])
            local = complete_checkpoints(self._root)

        self._check()
        self._newest_safe = max(local.keys() & self._complete.keys(), default=-1)
        if not self._has_given_up:
            self._report_newest(self._newest_safe)

        self._put_files()
        self._remove_remote(newest=self._newest_safe)

        if local:
            try:
                self._prune_local()
            except CheckpointError as error:
                log.warning(error)

    def _check(self) -> None:
        """Before anything that another run could lose by it, or that needs what another run may
        have deleted."""
        self._check_open()
        self._run.check_owner(self._id)

    def _check_open(self) -> None:
        """Raise if the run has ended."""
        # Where nodes continue without a lost one, the next mirror may have begun.
        if self._is_closed:
            raise _ClosedError

    def _missing(self, local: Mapping[int, Manifest]) -> set[int]:
        """The steps that are kept here, and are not in the store, or with other content."""
        if not local:
            return set()

        missing = set()
        for step in to_keep(local, self._retention) | {max(local)}:
            stored = self._complete.get(step)
            if stored is None or stored.files != local[step].files:
                missing.add(step)
        return missing

    def _upload(self, step: int, local: Manifest) -> None:
        """Upload a checkpoint, its manifest last."""
        path = self._root / catalog.folder_name(step)
        began = time.monotonic()
        total = file_size(sum(record.size for record in local.files.values()))

        try:
            self._put_checkpoint(local, path, total)
        except (OSError, StoreError):
            if path.is_dir():
                raise
            return  # retention has removed it meanwhile
        finally:
            self._doing = ""

        self._complete[step] = local
        seconds = duration(time.monotonic() - began)
        self._report(f"mirrored step {step} to {self._store} ({total} in {seconds})")

    def _put_checkpoint(self, local: Manifest, path: Path, total: str) -> None:
        """The files of a checkpoint, then those of the run, then the manifest."""
        step = local.step

        # it was saved again: from here on it is incomplete
        if step in self._complete:
            self._store.delete([object_name(step, manifest.FILE_NAME)])
            del self._complete[step]

        done = 0
        for file, record in local.files.items():
            self._doing = f"step {step}, {file_size(done)} of {total}"
            self._check_open()
            self._put(object_name(step, file), path / file, record)
            done += record.size

        self._put_files()
        self._check()

        content = manifest.render(local)
        record = FileRecord(len(content), blake3(content).hexdigest())
        self._put(object_name(step, manifest.FILE_NAME), content, record)

    def _put(self, name: str, content: Path | bytes, record: FileRecord) -> None:
        """Upload an object, and have the store confirm it."""
        self._store.put(name, content)
        self._store.check(name, size=record.size, checksum=record.blake3)

    def _put_files(self) -> None:
        """Upload the small files of the run that have changed: the events before the ledger, and of
        that only what it had before them, so that the ledger in the store is never ahead of the
        events."""
        self._check()
        files = [(path, path.lstat()) for path in self._files()]
        for path, status in reversed(files):
            name = path.relative_to(self._folder).as_posix()
            state = (status.st_size, status.st_mtime_ns)
            if self._sent.get(name) == state:
                continue

            if path.suffix == ".jsonl":
                self._put_lines(path, name, status.st_size)
            else:
                self._store.put(name, read_regular(path))

            self._sent[name] = state

    def _put_lines(self, path: Path, name: str, size: int) -> None:
        """A file that only grows, in pieces, of which only the last is uploaded again; of that one
        the whole lines."""
        with open_regular(path) as file:
            while True:
                number = self._num_pieces.get(name, 0)
                start = number * PIECE_BYTES
                file.seek(start)
                content = file.read(min(PIECE_BYTES, max(0, size - start)))

                if len(content) < PIECE_BYTES:
                    whole_lines = content[: content.rfind(b"\n") + 1]
                    self._store.put(piece_name(name, number), whole_lines)
                    return

                self._store.put(piece_name(name, number), content)
                self._num_pieces[name] = number + 1

    def _files(self) -> Iterator[Path]:
        """The small files of the run, in the order in which they depend on later ones."""
        paths = (self._folder / name for name in RUN_FILES)
        yield from (path for path in paths if path.is_file())
        for folder, ending in RUN_FOLDERS.items():
            yield from sorted((self._folder / folder).glob(f"*{ending}"))

    def _remove_remote(self, *, newest: int) -> None:
        """Retention in the store; and what belongs to no complete checkpoint is deleted, such as a
        killed upload."""
        complete = self._complete
        keep = to_keep(complete, self._retention) | {newest}
        for step in complete.keys() - keep:
            # The manifest first: from here on the checkpoint is incomplete.
            self._store.delete([object_name(step, manifest.FILE_NAME)])
            del complete[step]

        # Objects with another kind of name belong to someone else.
        unexpected = {name for name in self._store.sizes(CHECKPOINTS) if is_own_name(name)}
        for step, checkpoint in complete.items():
            files = (*checkpoint.files, manifest.FILE_NAME)
            unexpected -= {object_name(step, name) for name in files}

        # One whose manifest cannot be read is left.
        manifests = {name for name in unexpected if name.endswith(f"/{manifest.FILE_NAME}")}
        corrupt = {name.rpartition("/")[0] for name in manifests}
        self._store.delete(name for name in unexpected if name.rpartition("/")[0] not in corrupt)

    def _prune_local(self, newest: Path | None = None) -> None:
        """Remove local checkpoints that are not kept and are safe in the store."""
        with self._pruning:  # the other thread may have removed what was the newest
            if newest is None:
                newest_step = max(complete_checkpoints(self._root))
                newest = self._root / catalog.folder_name(newest_step)

            prune(
                self._root,
                self._retention,
                newest=newest,
                may_remove=lambda step: step <= self._newest_safe,
            )


def restore_run(run: MirroredRun, folder: Path) -> tuple[str, list[str]]:
    """Before a run starts: if its folder has no checkpoint, or the run has continued elsewhere,
    fetch the newest one of its mirror, and its records; of a restore that fails nothing is left.
    Returns a note, empty where nothing was restored, and why newer checkpoints were skipped."""
    records: list[Path] = []
    local = list(complete_checkpoints(folder / CHECKPOINTS))
    explanation = ""
    began = time.monotonic()

    try:
        mirrored = run.checkpoints()
        is_empty = not (mirrored.complete or mirrored.corrupt)

        if local and mirrored.complete:
            aside = run.set_aside(folder, newest=max(local), mirrored=max(mirrored.complete))
            if aside is not None:
                local = []
                explanation = f": the run has continued elsewhere; what was here is in {aside}"

        if local or is_empty:
            run.claim(folder, is_empty=is_empty)
            return "", []

        records.extend(run.fetch_files(folder))
        run.write_marker(folder, continues=True)

        # Last: it makes the run folder one to resume.
        step, skipped = run.restore_newest(mirrored, folder / CHECKPOINTS)
    except DrumlineError as error:
        for path in records:
            path.unlink(missing_ok=True)

        if not isinstance(error, StoreError):
            raise
        if local:  # the thread that uploads warns of it
            return "", []

        error.what = (
            f"the mirror may have a checkpoint to resume from, but cannot be read: {error.what}"
        )
        raise

    seconds = duration(time.monotonic() - began)
    return f"restored step {step} from {run.store} in {seconds}{explanation}", skipped
