"""Writes checkpoints into a folder beside the steps. A save has three layers:

    capture    the state is gathered by the caller, and copied here (`copying`), while training pauses
    write      a thread writes the copy into a hidden folder (`store`)
    publish    the complete folder gets its name; the caller removes old ones, or uploads to a mirror

Rank 0 writes, or several ranks do, each a part. Only rank 0 reports and fails. The `Saver`
of a run and the `Checkpoint` of a user's own loop capture and publish; both write with this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from drumline.base.errors import CheckpointError, log
from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.copying import Copier, Copy, Kind
from drumline.checkpoint.shard_files import SHARDS_FILE, Files, assign, assign_shards, shapes_of
from drumline.checkpoint.store import Collector, SaveMessages, WritingRank, write_own_part
from drumline.checkpoint.tensor_file import Tensors
from drumline.rank.collectives import gather_json
from drumline.rank.sealed_store import SealedStore

# When a run fails, the remaining ranks finish the save in progress; how long they wait for a rank
# that has exited.
LAST_PARTS_S = 10.0

Parts = Mapping[int, Mapping[str, Any]]
"""By rank: the files that it writes, each with its tensors; of another rank there may be only their
names."""


@dataclass(frozen=True)
class CapturedState:
    """The content of a checkpoint."""

    step: int
    """The number of optimizer steps that are done."""

    live: dict[str, Tensors]
    """Shares memory with the model and the optimizer: the next step changes it."""

    frozen: dict[str, Tensors]
    """Belongs to this save only."""

    documents: dict[str, Any]
    """By file."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the latest evaluation."""

    non_finite: str | None = None
    """The first tensor that is not finite, if there is one."""

    complete: Callable[[], None] = lambda: None
    """Called in the writer's thread when the copy is done, before anything is written."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is complete, and how long it took."""

    step: int
    path: Path
    num_bytes: int
    """Of all its files."""

    copy: Kind
    """Where the copy was."""

    seconds: float
    """From the beginning of the copy until the checkpoint was complete."""

    copy_s: float
    """How long a GPU copied."""


Writers = Literal["one", "nodes", "ranks"]
"""Who writes a checkpoint: a value of `checkpoint.writers`."""


def is_writer(who: Writers, local_rank: int) -> bool:
    """Whether a rank writes, besides rank 0, by its number on its host."""
    return {"one": False, "nodes": False, "ranks": True}[who] or local_rank == 0


class CheckpointWriter:
    """Writes the checkpoints of one folder in a thread, one at a time.

    After each step the training thread reads only `has_news`; there is no lock between the two. The
    result, or the error, is kept here until it is taken."""

    def __init__(
        self,
        root: Path,
        this_rank: WritingRank,
        device: torch.device,
        *,
        publish: Callable[[Path], object],
    ) -> None:
        """`publish(newest)` is called in the thread when a checkpoint is complete; what it raises
        is only logged."""
        self.has_news = False
        """Whether there is a result that has not been taken."""

        self.step = 0
        """Of the latest save."""

        self._root = root
        self._this_rank = this_rank
        self._device = device
        self._copier = Copier(device)
        """Keeps its buffers from save to save."""

        self._publish = publish
        self._writers = [WritingRank(0, this_rank.host)]
        """Rank 0 first."""

        self._num_shards = 1
        """Of a sharded model; 1: the model is not sharded."""

        self._store: SealedStore | None = None
        """For the messages of several writers; None: rank 0 writes alone."""

        self._end = threading.Event()
        """Set when the run fails: the thread waits for no other writer any more."""

        self._num_saves = 0
        """Tells the messages of one save from those of another; the same on all writers."""

        self._thread: threading.Thread | None = None
        """Of the latest save, until its result is taken."""

        self._written: WrittenCheckpoint | None = None
        """The result, until it is taken."""

        self._error: BaseException | None = None
        """In place of a result."""

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes."""
        return self._this_rank.rank in [writer.rank for writer in self._writers]

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def choose_writers(
        self,
        who: Writers,
        store: SealedStore,
        *,
        local_rank: int,
        num_shards: int,
    ) -> None:
        """Collective: let several ranks write, rank 0 first. `num_shards`: of a sharded model,
        whose first replica writes."""
        self._store = store.clone()
        self._num_shards = num_shards
        self._writers = []

        for rank, (host, number) in enumerate(gather_json([self._this_rank.host, local_rank])):
            writes = rank == 0 or is_writer(who, number)
            if num_shards > 1:
                writes = rank < num_shards
            if writes:
                self._writers.append(WritingRank(rank, host))

    def rehearse(self) -> None:
        """From a GPU, make a small copy before the first step, so that the first save need not load
        kernels and pin memory."""
        if self.is_writer and self._device.type == "cuda":
            self._copier.rehearse()

    def start(self, state: CapturedState, *, copies: bool) -> Kind:
        """On a writing rank: copy what is to be saved, and start to write it; returns where the
        copy is. Without one (`copies` is False, or there is no memory for it) the save is complete
        when this returns. The result of the save before must have been taken."""
        began = time.perf_counter()
        self._num_saves += 1
        self.step = state.step

        if self._num_shards > 1:
            shapes = shapes_of(state.live)
            state = replace(state, documents={**state.documents, SHARDS_FILE: shapes})

        parts = self._divide(state.live)
        part = parts[self._this_rank.rank]
        for tensors in part.values():
            tensor_file.num_bytes(tensors)  # refuses what cannot be saved

        copied = self._copier.take(part) if copies else self._copier.as_they_are(part)
        if self._this_rank.rank == 0:
            self._run_in_thread(partial(self._write, state, copied, parts, began))
        else:
            self._run_in_thread(partial(self._write_part, copied, state.step))

        if copied.kind == "none":
            self.wait()

        return copied.kind

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is done; False: it is still running after that time. Any thread may
        wait."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return not self.is_busy

    def take(self) -> WrittenCheckpoint | None:
        """Wait for the save and return its result, or raise its error; None: there was no save, or
        this rank wrote only a part."""
        self.wait()
        written = self._written
        error = self._error
        self._thread = None
        self._written = None
        self._error = None
        self.has_news = False

        if error is not None:
            raise error

        return written

    def wait_after_failure(self) -> None:
        """Finish the checkpoint that is being written, but do not wait for ranks that have
        exited."""
        if not self.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
            self._end.set()

    def _divide(self, live: Files) -> Parts:
        """The files of each writing rank. A rank that writes alone writes whole files."""
        if self._num_shards > 1:
            return assign_shards(live, self._this_rank.rank, self._num_shards)
        if len(self._writers) > 1:
            return assign(live, [writer.rank for writer in self._writers])

        return {0: live}

    def _run_in_thread(self, work: Callable[[], WrittenCheckpoint | None]) -> None:
        """Start the thread; its result or error is kept."""
        assert self._thread is None

        def run() -> None:
            try:
                self._written = work()
            except BaseException as error:
                self._error = error

            self.has_news = True

        # Not a daemon thread: a process that exits normally first completes the checkpoint.
        self._thread = threading.Thread(target=run, name="drumline-checkpoint")
        self._thread.start()

    def _write(
        self,
        state: CapturedState,
        copied: Copy,
        parts: Parts,
        began: float,
    ) -> WrittenCheckpoint:
        """On rank 0, in the thread."""
        part_writers = self._collector(parts)
        try:
            copy_s = copied.wait()
            state.complete()
        except BaseException:
            if part_writers is not None:
                part_writers.cancel()
            raise

        path = store.write(
            self._root,
            state.step,
            tensors={**copied.tensors, **state.frozen},
            documents=state.documents,
            metrics=state.metrics,
            non_finite=state.non_finite,
            stream=copied.stream,
            part_writers=part_writers,
        )
        seconds = time.perf_counter() - began
        num_bytes = sum(file.stat().st_size for file in path.iterdir())

        try:
            self._publish(path)
        except CheckpointError as error:
            # the new one is safe; an old one that remains is no reason to stop
            log.warning(error)

        return WrittenCheckpoint(state.step, path, num_bytes, copied.kind, seconds, copy_s)

    def _collector(self, parts: Parts) -> Collector | None:
        """What collects the parts of the other writing ranks; None: rank 0 writes alone."""
        this_rank, *other_writers = self._writers
        if not other_writers:
            return None

        expected = {
            writer: {store.file_name(name): group for name, group in parts[writer.rank].items()}
            for writer in other_writers
        }

        return Collector(self._messages(), this_rank, expected)

    def _write_part(self, copied: Copy, step: int) -> None:
        """On another writing rank, in the thread."""
        copied.wait()
        write_own_part(
            self._messages(),
            self._this_rank,
            self._root,
            step,
            tensors=copied.tensors,
            stream=copied.stream,
        )

    def _messages(self) -> SaveMessages:
        """Those of the save in progress."""
        assert self._store is not None
        return SaveMessages(self._store, self._num_saves, end=self._end)
