"""One checkpoint written by several ranks: which rank writes which tensors, and how rank 0 collects
their files.

All ranks hold the same replica, so any of them can write any tensor. Each writer writes its own
files into the folder that rank 0 made, and publishes their sizes and checksums in the store; rank 0
checks that they exist, and only then writes the manifest. Messages are JSON under keys of that
save. The store is polled: a thread that blocks in it blocks the other threads of its process.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint import store
from drumline.checkpoint.shard_files import is_in_shards, own_piece, piece_names
from drumline.checkpoint.store import WritingRank
from drumline.parallel.shards import own_part
from drumline.rank.sealed_store import SealedStore
from drumline.runs import catalog
from drumline.runs.manifest import FileRecord

POLL_S = 0.02
# Another host's files may appear late on a network file system.
SEEN_S = 10.0
SHARE_THE_FOLDER = "give a --run on a volume that all nodes share, or --checkpoint.writers one"

Files = dict[str, dict[str, Tensor]]


def assign(tensors: Mapping[str, Mapping[str, Tensor]], ranks: Sequence[int]) -> dict[int, Files]:
    """Assign the tensors of every file to these ranks, about the same bytes to each; the same on
    every rank."""
    assigned: dict[int, Files] = {rank: {} for rank in ranks}
    loads = [(0, position, rank) for position, rank in enumerate(ranks)]
    sized = [
        (file, name, tensor) for file, group in tensors.items() for name, tensor in group.items()
    ]
    for file, name, tensor in sorted(
        sized, key=lambda entry: (-entry[2].nbytes, entry[0], entry[1])
    ):
        load, position, rank = heapq.heappop(loads)
        assigned[rank].setdefault(store.part_name(file, rank), {})[name] = tensor
        heapq.heappush(loads, (load + tensor.nbytes, position, rank))
    for file, group in tensors.items():
        if not group:  # a file without tensors is part of the checkpoint too
            assigned[ranks[0]][file] = {}
    return assigned


def assign_shards(
    tensors: Mapping[str, Mapping[str, Tensor]], rank: int, num_writers: int
) -> dict[int, dict[str, Any]]:
    """The files of each writer of a sharded model: `rank` gets its own tensors, for the others
    there are their names. Rank 0 writes what is not sharded, too."""
    assigned: dict[int, dict[str, dict[str, Any]]] = {writer: {} for writer in range(num_writers)}
    for file, group in tensors.items():
        for name, tensor in group.items():
            if is_in_shards(name, tensor):
                rows_here = own_piece(tensor)
                pieces = piece_names(name, tensor)
            else:
                rows_here = own_part(tensor)
                pieces = {0: name}
            for writer, piece in pieces.items():
                part = assigned[writer].setdefault(store.part_name(file, writer), {})
                part[piece] = rows_here if writer == rank else None
        if not group:  # a file without tensors is part of the checkpoint too
            assigned[0][file] = {}
    return assigned


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


class Collector:
    """Rank 0's side: announces the folder, and collects what the other ranks write into it."""

    def __init__(
        self,
        messages: SaveMessages,
        me: WritingRank,
        expected: Mapping[WritingRank, Mapping[str, Iterable[str]]],
    ) -> None:
        """`expected`: the files of each of the others, and the tensors in each."""
        self._messages = messages
        self._me = me
        self._expected = expected

    def begin(self) -> None:
        self._messages.send("open", str(self._me))

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, and the other ranks too
            self._messages.send("cancelled", True)

    def collect(self, partial: Path) -> dict[str, FileRecord]:
        files: dict[str, FileRecord] = {}
        for writer, expected in self._expected.items():
            records = self._records_of(
                writer, {name: sorted(group) for name, group in expected.items()}
            )
            for name, record in records.items():
                self._check_file(partial, name, record, writer)
            files |= records
        with contextlib.suppress(RuntimeError):  # all replies are here
            self._messages.delete("open", *(f"part/{writer.rank}" for writer in self._expected))
        return files

    def _records_of(
        self, writer: WritingRank, expected: dict[str, list[str]]
    ) -> dict[str, FileRecord]:
        try:
            _, reply = self._messages.wait_for(f"part/{writer.rank}")
        except (TimeoutError, RuntimeError) as error:
            what = f"{writer} exited before its part was written"
            raise store.PartError(what, "read the output of that rank") from error
        if "failure" in reply:
            raise store.PartError(f"{writer}: {reply['failure'][0]}", reply["failure"][1])
        if reply["tensors"] != expected:
            raise store.PartError(
                f"{writer} has other tensors than {self._me}: its model or optimizer differs",
                "build the same model and optimizer on every rank",
            )
        return {name: FileRecord(**record) for name, record in reply["files"].items()}

    def _check_file(
        self, partial: Path, name: str, record: FileRecord, writer: WritingRank
    ) -> None:
        path = partial / name
        if not _becomes_true(SEEN_S, lambda: path.is_file() and path.stat().st_size == record.size):
            raise store.PartError(
                f"{name}, which {writer} has written, is not in {partial} on {self._me.host}: the nodes do not "
                "share this folder",
                SHARE_THE_FOLDER,
            )


def write_own_part(
    messages: SaveMessages,
    me: WritingRank,
    root: Path,
    step: int,
    *,
    tensors: Files,
    stream: store.Stream,
) -> None:
    """The other writers' side: write into rank 0's folder, and report the files or the failure."""
    partial = store.hidden_folder(root / catalog.folder_name(step), "partial")
    try:
        key, maker = messages.wait_for("open", "cancelled")
        if key == "cancelled":
            return
        if not _becomes_true(SEEN_S, partial.is_dir):
            reason = f"{partial}, which {maker} made, is not visible here: the nodes do not share this folder"
            messages.send(f"part/{me.rank}", {"failure": [reason, SHARE_THE_FOLDER]})
            return
        # Before they are written: writing empties the groups to free their memory.
        names = {store.file_name(name): sorted(group) for name, group in tensors.items()}
        reply: dict[str, Any] = {"tensors": names}
        try:
            files = store.write_tensors(partial, tensors, stream)
            store.flush_folder(partial)
            reply["files"] = {name: asdict(record) for name, record in files.items()}
        except OSError as error:
            reply["failure"] = list(catalog.explain_os_error(error, folder=root))
        except Exception as error:
            reply["failure"] = [f"{type(error).__name__}: {error}", "read the output of that rank"]
        messages.send(f"part/{me.rank}", reply)
    except (TimeoutError, RuntimeError):  # rank 0 has exited, so there is no save
        pass


def _becomes_true(seconds: float, is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
