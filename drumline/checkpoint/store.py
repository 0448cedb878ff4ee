"""Writes checkpoints: into a hidden folder, flushed to the device, renamed when complete; and reads
and removes them.

A checkpoint is a folder `ROOT/step-NNNNNNNN/` of safetensors and JSON files with a manifest. This
module knows only tensors and documents by file name. A file of tensors may be in parts, written by
several processes. Hidden folders next to it are incomplete:

- `.step-N.partial`: being written, or left by a process that was killed while it wrote;
- `.step-N.replaced`: an earlier one of the same step, until its replacement is in place;
- `.step-N.removed`: being deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import flush_folder, from_json
from drumline.checkpoint import tensor_file
from drumline.checkpoint.shard_files import (
    SHARDS_FILE,
    Files,
    PartFiles,
    assemble,
    whole_name,
)
from drumline.checkpoint.tensor_file import Tensors
from drumline.rank.collectives import broadcast_json, broadcast_tensors
from drumline.rank.sealed_store import SealedStore
from drumline.runs import catalog, manifest
from drumline.runs.manifest import FileRecord, Manifest

_TENSORS = ".safetensors"

# Large enough that a thread that hashes or writes seldom needs the GIL, which the training thread
# uses.
_PIECE_BYTES = 8 << 20
_WORTH_A_THREAD = 1 << 20
POLL_S = 0.02

# Another host's files may appear late on a network file system.
SEEN_S = 10.0
SHARE_THE_FOLDER = "give a --run on a volume that all nodes share, or --checkpoint.writers one"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: tensors by file and documents by file, named without their
    ending."""

    tensors: dict[str, Tensors]
    documents: dict[str, Any]
    """JSON values."""


@dataclass(frozen=True)
class WritingRank:
    """A rank that writes a checkpoint, or a part of it."""

    rank: int
    host: str
    """For messages."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


Stream = Callable[[Tensors], Iterable[bytes | memoryview]]


def write(
    root: Path,
    step: int,
    *,
    tensors: Files,
    documents: Mapping[str, Any],
    metrics: Mapping[str, float],
    non_finite: str | None = None,
    stream: Stream = tensor_file.stream,
    part_writers: Collector | None = None,
) -> Path:
    """Save a checkpoint. When this returns, it is complete and on disk; until then earlier ones are
    kept.

    `non_finite`: the first tensor that is not finite, if any. `stream`: makes the bytes of a file
    of tensors. `part_writers`: the other processes that write to the folder.
    """
    final = root / catalog.folder_name(step)

    # Not indented: that encoder is written in Python, and would hold the GIL for milliseconds
    # during a step.
    texts = {
        f"{name}{catalog.DOCUMENT}": json.dumps(document).encode() + b"\n"
        for name, document in documents.items()
    }

    needed = sum(map(tensor_file.num_bytes, tensors.values())) + sum(map(len, texts.values()))
    try:
        with new_folder(final) as partial:
            if part_writers is not None:
                part_writers.begin()

            files = write_tensors(partial, tensors, stream)
            files |= {name: write_file(partial / name, [text]) for name, text in texts.items()}
            if part_writers is not None:
                files |= part_writers.collect(partial)

            created = datetime.now(UTC).isoformat(timespec="seconds")
            numbers = {name: float(value) for name, value in metrics.items()}
            record = Manifest(step, created, numbers, files, non_finite)

            # The last file of a checkpoint, which is complete with it.
            write_file(partial / manifest.FILE_NAME, [manifest.render(record)])
    except BaseException as error:
        if part_writers is not None:
            part_writers.cancel()

        if isinstance(error, OSError):
            reason, next_step = catalog.explain_os_error(error, folder=root, needed=needed)
            raise _not_saved(final, reason, next_step) from error
        if isinstance(error, CheckpointError):
            raise _not_saved(final, error.what, error.next_step) from error
        raise

    return final


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A hidden folder, which gets the name of the checkpoint at the end of the block. After an error
    it is deleted, and an earlier checkpoint of that step is back in its place."""
    partial = hidden_folder(final, "partial")
    try:
        make_folder(final.parent)
        _tidy(final.parent)
        partial.mkdir()
        yield partial
        flush_folder(partial)
        put_in_place(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            delete_folder(partial)
        with contextlib.suppress(OSError):
            if not final.exists():
                hidden_folder(final, "replaced").rename(final)
        raise


def write_tensors(partial: Path, files: Files, stream: Stream) -> dict[str, FileRecord]:
    """Write files of tensors into a checkpoint that this process or another one creates."""
    return {
        file_name(file): write_file(partial / file_name(file), stream(tensors))
        for file, tensors in files.items()
    }


def file_name(name: str) -> str:
    """Of a file of tensors."""
    return f"{name}{_TENSORS}"


def read(path: Path, *, only: Collection[str] = ()) -> Snapshot:
    """Read a complete checkpoint, or `only` these files of it; verify it first. Tensors are mapped
    from their files: copy those that you keep."""
    stored: dict[str, dict[str, Tensor]] = {}
    documents: dict[str, Any] = {}
    for file in map(Path, manifest.read(path).files):
        name = whole_name(file.stem)
        if only and name not in (*only, SHARDS_FILE):
            continue

        if file.suffix == _TENSORS:
            stored.setdefault(name, {}).update(tensor_file.read(path / file))
        elif file.suffix == catalog.DOCUMENT:
            documents[file.stem] = catalog.read_document(path, file.stem)

    tensors: dict[str, Tensors] = {**stored}
    if (shapes := documents.pop(SHARDS_FILE, None)) is not None:
        with manifest.reading(path, f"{SHARDS_FILE}{catalog.DOCUMENT}"):
            tensors = assemble(stored, shapes)

    return Snapshot(tensors, documents)


def broadcast(snapshot: Snapshot | None, *, source: int = 0, keeps: bool = True) -> Snapshot:
    """Collective: what rank `source` has, on every rank; the others give None. A rank that does not
    `keep` it only takes part: it gets no tensors."""
    contents = None if snapshot is None else [snapshot.documents, list(snapshot.tensors)]
    documents, files = broadcast_json(contents, source=source)

    tensors: dict[str, Tensors] = {}
    for file in files:
        sent = None if snapshot is None else snapshot.tensors[file]
        tensors[file] = broadcast_tensors(sent, source=source, keeps=keeps)

    return Snapshot(tensors, documents)


def remove(path: Path) -> None:
    """Delete a checkpoint; if the process is killed meanwhile, no incomplete one has a valid
    name."""
    hidden = hidden_folder(path, "removed")
    try:
        delete_folder(hidden)
        path.rename(hidden)
        delete_folder(hidden)
    except OSError as error:
        reason, next_step = catalog.explain_os_error(error, folder=path.parent)
        what = f"the checkpoint {path} could not be removed: {reason}"
        raise CheckpointError(what, next_step=next_step) from error


def put_in_place(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name, in place of an earlier one of the same step."""
    # A folder cannot be renamed over another one. Between the two renames the earlier one is still
    # found: `newest_valid` knows its hidden name.
    replaced = hidden_folder(final, "replaced")
    if final.is_dir():
        final.rename(replaced)

    partial.rename(final)
    flush_folder(final.parent)
    with contextlib.suppress(OSError):  # the next write deletes the rest of the old one
        delete_folder(replaced)


def _tidy(root: Path) -> None:
    """Delete what a killed process left."""
    for path in catalog.folders(root):
        if not (name := catalog.HIDDEN_NAME.fullmatch(path.name)):
            continue

        if name[2] == "replaced" and not (root / name[1]).exists():
            path.rename(root / name[1])
        else:
            delete_folder(path)


def _not_saved(final: Path, reason: str, next_step: str | None) -> CheckpointError:
    """The error, with what is left for the user."""
    root = final.parent
    earlier = "there is no earlier checkpoint"
    try:
        good = catalog.newest_valid(root).path
        if good is not None:
            earlier = f"the last good checkpoint, {good}, is untouched"
    except CheckpointError:
        earlier = "earlier checkpoints cannot be read"

    return CheckpointError(
        f"the checkpoint {final} could not be saved: {reason}; {earlier}",
        next_step=f"{next_step}, or use another run folder; then rerun the same command",
    )


def hidden_folder(final: Path, kind: str) -> Path:
    """`kind`: partial, replaced or removed."""
    return final.parent / f".{final.name}.{kind}"


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and wait until it is on disk; its size and checksum come from the same
    pass."""
    # A second thread hashes what is being written. blake3's default thread pool does not survive a
    # fork, so a forked process that hashes would hang; this pool exists only for this file. It has
    # a few threads on many cores.
    checksum = blake3(max_threads=max(1, min(4, len(os.sched_getaffinity(0)) // 4)))
    size = 0
    with path.open("xb") as file, ThreadPoolExecutor(1, "drumline-checksum") as beside:
        for chunk in chunks:
            for start in range(0, len(chunk), _PIECE_BYTES):
                piece = chunk[start : start + _PIECE_BYTES]
                if len(piece) < _WORTH_A_THREAD:
                    checksum.update(piece)
                    file.write(piece)
                else:
                    hashed = beside.submit(checksum.update, piece)
                    file.write(piece)
                    hashed.result()

                size += len(piece)

        file.flush()
        os.fsync(file.fileno())

    return FileRecord(size, checksum.hexdigest())


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and wait until their names are on disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def delete_folder(folder: Path) -> None:
    """Delete a folder, or a link to one, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)


# A checkpoint that several ranks write, each a part, from their threads. Each writer of a part writes
# its own files into the folder that rank 0 made, and publishes their sizes and checksums in the job's
# store; rank 0 checks that they exist, and only then writes the manifest. The store is polled: a
# thread that blocks in it blocks the other threads of its process.


class SaveMessages:
    """The messages of one save. `store`: the writing thread's own connection."""

    def __init__(self, store: SealedStore, number: int, *, end: threading.Event) -> None:
        self._store = store.under(f"checkpoint/{number}")
        self._end = end

    def send(self, key: str, value: Any) -> None:
        """To all that take part in this save."""
        self._store.set(key, json.dumps(value))

    def wait_for(self, *keys: str) -> tuple[str, Any]:
        """The first of these keys that is set; TimeoutError when the run ends first."""
        while True:
            for key in keys:
                if (value := self._store.peek(key)) is not None:
                    return key, json.loads(value)

            if self._end.is_set():
                raise TimeoutError
            time.sleep(POLL_S)

    def delete(self, *keys: str) -> None:
        """Delete messages that all have read: a run may save many thousand times."""
        for key in keys:
            self._store.delete_key(key)


@dataclass(frozen=True)
class Collector:
    """Rank 0's side: announces the folder, and collects what the other ranks write into it."""

    messages: SaveMessages
    this_rank: WritingRank
    """Rank 0."""

    expected: Mapping[WritingRank, Mapping[str, Iterable[str]]]
    """The files of each of the others, and the tensors in each."""

    def begin(self) -> None:
        """Called when the folder exists."""
        self.messages.send("open", str(self.this_rank))

    def cancel(self) -> None:
        """Called when the save has failed."""
        with contextlib.suppress(RuntimeError):  # the store has ended, and the other ranks too
            self.messages.send("cancelled", True)

    def collect(self, partial: Path) -> dict[str, FileRecord]:
        """Wait for the files of the others; raises CheckpointError."""
        files: dict[str, FileRecord] = {}
        for writer, expected in self.expected.items():
            names = {file: sorted(tensors) for file, tensors in expected.items()}
            records = self._records_of(writer, names)
            for file, record in records.items():
                self._check_file(partial / file, record, writer)

            files |= records

        with contextlib.suppress(RuntimeError):  # all replies are here
            self.messages.delete("open", *(f"part/{writer.rank}" for writer in self.expected))

        return files

    def _records_of(
        self, writer: WritingRank, expected: dict[str, list[str]]
    ) -> dict[str, FileRecord]:
        """What a writer has written, unless it failed or holds other tensors."""
        try:
            _, reply = self.messages.wait_for(f"part/{writer.rank}")
        except (TimeoutError, RuntimeError) as error:
            raise CheckpointError(
                f"{writer} exited before its part was written",
                next_step="read the output of that rank",
            ) from error

        if "failure" in reply:
            reason, next_step = reply["failure"]
            raise CheckpointError(f"{writer}: {reason}", next_step=next_step)

        if reply["tensors"] != expected:
            raise CheckpointError(
                f"{writer} has other tensors than {self.this_rank}: its model or optimizer differs",
                next_step="build the same model and optimizer on every rank",
            )

        return from_json(dict[str, FileRecord], reply["files"])

    def _check_file(self, path: Path, record: FileRecord, writer: WritingRank) -> None:
        """Refuse a file that is not in the folder as this host sees it."""
        if not _becomes_true(lambda: path.is_file() and path.stat().st_size == record.size):
            raise CheckpointError(
                f"{path.name}, which {writer} has written, is not in {path.parent} on {self.this_rank.host}: "
                "the nodes do not share this folder",
                next_step=SHARE_THE_FOLDER,
            )


def write_own_part(
    messages: SaveMessages,
    this_rank: WritingRank,
    root: Path,
    step: int,
    *,
    tensors: PartFiles,
    stream: Stream,
) -> None:
    """The other writers' side: write into rank 0's folder, and report the files or the failure."""
    partial = hidden_folder(root / catalog.folder_name(step), "partial")
    try:
        key, maker = messages.wait_for("open", "cancelled")
        if key == "cancelled":
            return

        if not _becomes_true(partial.is_dir):
            reason = f"{partial}, which {maker} made, is not visible here: the nodes do not share this folder"
            messages.send(f"part/{this_rank.rank}", {"failure": [reason, SHARE_THE_FOLDER]})
            return

        # Before they are written: writing empties the groups to free their memory.
        names = {file_name(name): sorted(group) for name, group in tensors.items()}
        reply: dict[str, Any] = {"tensors": names}
        try:
            files = write_tensors(partial, tensors, stream)
            flush_folder(partial)
            reply["files"] = msgspec.to_builtins(files)
        except OSError as error:
            reply["failure"] = list(catalog.explain_os_error(error, folder=root))
        except Exception as error:
            reply["failure"] = [f"{type(error).__name__}: {error}", "read the output of that rank"]

        messages.send(f"part/{this_rank.rank}", reply)
    except (TimeoutError, RuntimeError):  # rank 0 has exited, so there is no save
        pass


def _becomes_true(is_so: Callable[[], bool]) -> bool:
    """Wait for a condition; False: it was not met in time."""
    deadline = time.monotonic() + SEEN_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)

    return True
