"""Saves checkpoints into a folder beside the steps: training pauses for a copy of the state, and a
thread writes it.

Rank 0 writes, or several ranks do, each a part. Only rank 0 reports and fails. The engine's `Saver`
and the `Checkpoint` of a user's own loop are built on this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from drumline.base.errors import CheckpointError, log
from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.copying import Copier, Copy, Kind, Writer
from drumline.checkpoint.parts import Collector, SaveMessages, assign, assign_shards, write_own_part
from drumline.checkpoint.shard_files import SHARDS_FILE, shapes_of
from drumline.checkpoint.store import WritingRank
from drumline.rank.collectives import gather_json
from drumline.rank.sealed_store import SealedStore

# When a run fails, the remaining ranks finish the save in progress; how long they wait for a rank
# that has exited.
LAST_PARTS_S = 10.0


@dataclass(frozen=True)
class GatheredState:
    """The content of a checkpoint."""

    live: dict[str, Mapping[str, Tensor]]
    """Shares memory with the model and the optimizer: the next step changes it."""
    frozen: dict[str, Mapping[str, Tensor]]
    """Belongs to this save only."""
    documents: dict[str, Any]
    complete: Callable[[], None] = lambda: None
    """Called in the writer's thread when the copy is done, before anything is written."""


Writers = Literal["one", "nodes", "ranks"]
"""Who writes a checkpoint: a value of `checkpoint.writers`."""


def is_writer(who: Writers, local_rank: int) -> bool:
    """Whether a rank writes, besides rank 0, by its number on its host."""
    match who:
        case "one" | "nodes":
            return local_rank == 0
        case "ranks":
            return True
        case _:
            assert_never(who)


class BackgroundSaver:
    """Writes the checkpoints of one folder, one at a time."""

    def __init__(
        self, root: Path, me: WritingRank, device: torch.device, *, prune: Callable[[Path], object]
    ) -> None:
        """`prune(newest)` removes what is not to be kept once a checkpoint is complete."""
        self.writer: Writer[dict[str, Any] | None] = Writer()
        self.step = 0
        """Of the latest save."""
        self._root = root
        self._me = me
        self._device = device
        self._prune = prune
        self._copier = Copier(device)
        self._writers = [WritingRank(0, me.host)]
        self._num_shards = 1
        self._store: SealedStore | None = None
        self._end = threading.Event()
        self._num_saves = 0

    @property
    def is_writer(self) -> bool:
        return self._me.rank in [writer.rank for writer in self._writers]

    def choose_writers(
        self, who: Writers, store: SealedStore, *, local_rank: int, num_shards: int = 1
    ) -> None:
        """Collective: let several ranks write, rank 0 first. `num_shards`: of a sharded model,
        whose first replica writes."""
        self._store = store.clone()
        self._num_shards = num_shards
        ranks = gather_json([self._me.host, local_rank], device=self._device)
        self._writers = [
            WritingRank(rank, host)
            for rank, (host, local_rank) in enumerate(ranks)
            if (rank < num_shards if num_shards > 1 else rank == 0 or is_writer(who, local_rank))
        ]

    def rehearse(self) -> None:
        """Make a small copy before the first step, so that the first save need not load and pin."""
        if self.is_writer:
            self._copier.rehearse()

    def start(
        self, step: int, state: GatheredState, *, copies: bool, about: Mapping[str, Any]
    ) -> Kind:
        """On a writing rank: copy what is to be saved, and start to write it; returns where the
        copy is. Without one (`copies` is False, or there is no memory for it) the save is complete
        when this returns. `about`: the metrics and `non_finite` of the manifest."""
        began = time.perf_counter()
        self._num_saves += 1
        self.step = step
        rank = self._me.rank
        parts: Mapping[int, Mapping[str, Any]] = {
            0: state.live
        }  # a rank that writes alone writes whole files
        if self._num_shards > 1:
            parts = assign_shards(state.live, rank, self._num_shards)
            state = replace(
                state, documents={**state.documents, SHARDS_FILE: shapes_of(state.live)}
            )
        elif len(self._writers) > 1:
            parts = assign(state.live, [writer.rank for writer in self._writers])
        for group in parts[rank].values():
            tensor_file.num_bytes(group)  # refuses what cannot be saved
        copied = self._copier.take(parts[rank]) if copies else self._copier.as_they_are(parts[rank])
        if rank == 0:
            self.writer.start(partial(self._write, step, state, copied, parts, about, began))
        else:
            self.writer.start(partial(self._write_part, copied, step))
        if copied.kind == "none":
            self.writer.wait()
        return copied.kind

    def wait_after_failure(self) -> None:
        """Finish the checkpoint that is being written, but do not wait for ranks that have
        exited."""
        if not self.writer.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
            self._end.set()

    def _write(
        self,
        step: int,
        state: GatheredState,
        copied: Copy,
        parts: Mapping[int, Mapping[str, Any]],
        about: Mapping[str, Any],
        began: float,
    ) -> dict[str, Any]:
        """On rank 0, in the writer's thread. Returns the fields of the event."""
        copy_s = copied.wait()
        state.complete()
        me, *other_writers = self._writers
        expected = {
            writer: {store.file_name(name): group for name, group in parts[writer.rank].items()}
            for writer in other_writers
        }
        path = store.write(
            self._root,
            step,
            tensors={**copied.tensors, **state.frozen},
            documents=state.documents,
            stream=copied.stream,
            part_writers=Collector(self._messages(), me, expected) if other_writers else None,
            **about,
        )
        seconds = time.perf_counter() - began
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        try:
            self._prune(path)
        except CheckpointError as error:
            log.warning(error)  # the new one is safe; an old one that remains is no reason to stop
        times = {"seconds": seconds, "copy_s": copy_s}
        return {"step": step, "path": str(path), "bytes": num_bytes, "copy": copied.kind, **times}

    def _write_part(self, copied: Copy, step: int) -> None:
        """On another writing rank, in the writer's thread."""
        copied.wait()
        write_own_part(
            self._messages(),
            self._me,
            self._root,
            step,
            tensors=copied.tensors,
            stream=copied.stream,
        )

    def _messages(self) -> SaveMessages:
        assert self._store is not None
        return SaveMessages(self._store, self._num_saves, end=self._end)
