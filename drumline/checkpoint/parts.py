"""One checkpoint, written by several ranks: who writes which tensors, and what they tell each other.

All ranks hold the same replica, so any of them can write any tensor. Each writer puts files of its own into the folder
that rank 0 has made, and says through the store what they are; rank 0 makes sure that they are there, and only then
writes the manifest. What is said is JSON under keys of that save. Everything here is asked for again and again rather
than waited for: a rank's thread that waits in the store would keep it for itself.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from drumline.checkpoint import disk, store
from drumline.checkpoint.manifest import FileRecord
from drumline.launch.node.sealed_store import SealedStore

POLL_S = 0.02
# Another host's files may show up late on a network file system.
SEEN_S = 10.0
SHARE = "give a --run on a volume that all nodes share, or --checkpoint.writers one"

Files = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class WritingRank:
    """Who writes."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def deal(tensors: Mapping[str, Mapping[str, Tensor]], ranks: Sequence[int]) -> dict[int, Files]:
    """The tensors of every file among these ranks, to each about as many bytes: the same deal wherever it is made."""
    shares: dict[int, Files] = {rank: {} for rank in ranks}
    loads = [(0, position, rank) for position, rank in enumerate(ranks)]
    sized = [(file, name, tensor) for file, group in tensors.items() for name, tensor in group.items()]
    for file, name, tensor in sorted(sized, key=lambda entry: (-entry[2].nbytes, entry[0], entry[1])):
        load, position, rank = heapq.heappop(loads)
        shares[rank].setdefault(store.part_name(file, rank), {})[name] = tensor
        heapq.heappush(loads, (load + tensor.nbytes, position, rank))
    for file, group in tensors.items():
        if not group:  # that there is nothing is to be read too
            shares[ranks[0]][file] = {}
    return shares


class Telling:
    """What one rank says and hears of one save. `store`: a connection of the writing thread's own."""

    def __init__(self, store: SealedStore, number: int, *, end: threading.Event) -> None:
        self._store = store.under(f"checkpoint/{number}")
        self._end = end

    def say(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def hear(self, *keys: str) -> tuple[str, Any]:
        """The first of these keys that somebody sets; at the end of a run that fails, nobody may."""
        while True:
            for key in keys:
                if (value := self._store.peek(key)) is not None:
                    return key, json.loads(value)
            if self._end.is_set():
                raise TimeoutError
            time.sleep(POLL_S)

    def forget(self, *keys: str) -> None:
        """What all have heard; a run may save many thousand times."""
        for key in keys:
            self._store.delete_key(key)


class Collector:
    """Rank 0's side: it makes the folder, and gathers what the others have written into it."""

    def __init__(
        self,
        telling: Telling,
        me: WritingRank,
        expected: Mapping[WritingRank, Mapping[str, Iterable[str]]],
        *,
        seen_s: float = SEEN_S,
    ) -> None:
        """`expected`: the files of each of the others, and the tensors in each."""
        self._telling = telling
        self._me = me
        self._expected = expected
        self._seen_s = seen_s

    def begin(self, partial: Path) -> None:
        self._telling.say("open", str(self._me))

    def give_up(self) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone, and the others with it
            self._telling.say("given up", True)

    def collect(self, partial: Path) -> dict[str, FileRecord]:
        files: dict[str, FileRecord] = {}
        for writer, expected in self._expected.items():
            records = self._records_of(writer, {name: sorted(group) for name, group in expected.items()})
            for name, record in records.items():
                self._make_sure(partial, name, record, writer)
            files |= records
        with contextlib.suppress(dist.DistError, RuntimeError):  # all that is needed was said
            self._telling.forget("open", *(f"part/{writer.rank}" for writer in self._expected))
        return files

    def _records_of(self, writer: WritingRank, expected: dict[str, list[str]]) -> dict[str, FileRecord]:
        try:
            _, said = self._telling.hear(f"part/{writer.rank}")
        except (TimeoutError, dist.DistError, RuntimeError) as error:
            raise store.PartError(
                f"{writer} ended before its part was written", "see the output of that rank"
            ) from error
        if "failure" in said:
            raise store.PartError(f"{writer}: {said['failure'][0]}", said["failure"][1])
        if said["tensors"] != expected:
            other = _difference(said["tensors"], expected)
            raise store.PartError(
                f"{writer} has {other}: its model or optimizer is not that of {self._me}",
                "build the same model and optimizer on every rank",
            )
        return {name: FileRecord(**record) for name, record in said["files"].items()}

    def _make_sure(self, partial: Path, name: str, record: FileRecord, writer: WritingRank) -> None:
        path = partial / name
        if not _within(self._seen_s, lambda: path.is_file() and path.stat().st_size == record.size):
            raise store.PartError(
                f"{name}, which {writer} has written, is not in {partial} on {self._me.host}: the folder is not one "
                "that all nodes share",
                SHARE,
            )


def contribute(
    telling: Telling,
    me: WritingRank,
    root: Path,
    step: int,
    *,
    tensors: Files,
    stream: store.Stream,
    seen_s: float = SEEN_S,
) -> None:
    """The other writers' side: write into rank 0's folder, and tell it. What fails is told too: rank 0 then fails."""
    partial = store.partial_folder(root, step)
    try:
        key, maker = telling.hear("open", "given up")
        if key == "given up":
            return
        if not _within(seen_s, partial.is_dir):
            reason = f"it does not see {partial}, which {maker} has made: the folder is not one that all nodes share"
            telling.say(f"part/{me.rank}", {"failure": [reason, SHARE]})
            return
        telling.say(f"part/{me.rank}", _written(partial, tensors, stream))
    except (TimeoutError, dist.DistError, RuntimeError):  # rank 0 is gone, and the save with it
        pass


def _written(partial: Path, tensors: Files, stream: store.Stream) -> dict[str, Any]:
    # Before they are written, which empties the groups: their memory is given back as it goes.
    names = {store.file_name(name): sorted(group) for name, group in tensors.items()}
    try:
        files = store.write_part(partial, tensors, stream)
    except OSError as error:
        return {"failure": list(disk.explain(error, folder=partial.parent))}
    except Exception as error:
        return {"failure": [f"{type(error).__name__}: {error}", "see the output of that rank"]}
    return {"files": {name: asdict(record) for name, record in files.items()}, "tensors": names}


def _difference(written: dict[str, list[str]], expected: dict[str, list[str]]) -> str:
    """A tensor that one of two deals has and the other has not, with the file that it is in."""
    ours, theirs = ({(file, name) for file in deal for name in deal[file]} for deal in (expected, written))
    if missing := sorted(ours - theirs):
        return f"no {missing[0][1]} for {missing[0][0]}"
    return f"{min(theirs - ours)[1]} for {min(theirs - ours)[0]}"


def _within(seconds: float, is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
