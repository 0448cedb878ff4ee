"""A checkpoint that several ranks write, each a part (`shard_files`), from their threads.

Each writer of a part writes its own files into the folder that rank 0 made, and publishes their
sizes and checksums in the store; rank 0 checks that they exist, and only then writes the manifest.
Messages are JSON under keys of that save. The store is polled: a thread that blocks in it blocks
the other threads of its process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import flush_folder, from_json
from drumline.checkpoint import store
from drumline.checkpoint.shard_files import PartFiles
from drumline.checkpoint.store import WritingRank
from drumline.rank.sealed_store import SealedStore
from drumline.runs import catalog
from drumline.runs.manifest import FileRecord

POLL_S = 0.02
# Another host's files may appear late on a network file system.
SEEN_S = 10.0
SHARE_THE_FOLDER = "give a --run on a volume that all nodes share, or --checkpoint.writers one"


class SaveMessages:
    """The messages of one save. `store`: the writing thread's own connection."""

    def __init__(self, store: SealedStore, number: int, *, end: threading.Event) -> None:
        self._store = store.under(f"checkpoint/{number}")
        self._end = end

    def send(self, key: str, value: Any) -> None:
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
    expected: Mapping[WritingRank, Mapping[str, Iterable[str]]]
    """The files of each of the others, and the tensors in each."""

    def begin(self) -> None:
        """Called when the folder exists."""
        self.messages.send("open", str(self.this_rank))

    def cancel(self) -> None:
        """Called when the save has failed."""
        with suppress(RuntimeError):  # the store has ended, and the other ranks too
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

        with suppress(RuntimeError):  # all replies are here
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
    stream: store.Stream,
) -> None:
    """The other writers' side: write into rank 0's folder, and report the files or the failure."""
    partial = store.hidden_folder(root / catalog.folder_name(step), "partial")
    try:
        key, maker = messages.wait_for("open", "cancelled")
        if key == "cancelled":
            return
        if not _becomes_true(partial.is_dir):
            reason = f"{partial}, which {maker} made, is not visible here: the nodes do not share this folder"
            messages.send(f"part/{this_rank.rank}", {"failure": [reason, SHARE_THE_FOLDER]})
            return

        # Before they are written: writing empties the groups to free their memory.
        names = {store.file_name(name): sorted(group) for name, group in tensors.items()}
        reply: dict[str, Any] = {"tensors": names}
        try:
            files = store.write_tensors(partial, tensors, stream)
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
