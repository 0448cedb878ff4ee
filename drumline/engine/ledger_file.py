"""The sample ledger on file: `ledger.jsonl` in the run folder, written by rank 0 at each start and before each save.

    {"kind":"start","step":0,"epoch":0,"position":0,"world_size":2,"batch_size":64,"samples":1437,"seed":0,...}
    {"kind":"steps","first":1,"last":23,"ranks":[[[0,0,32,64,22],[0,1408,1423,29,1]],[[0,32,64,64,22],...]]}

A start names the step that it resumes from, so later steps above it in the file were repeated and do not count. The
steps are on the device before the checkpoint that holds them is. A save costs about 45 bytes and, for each rank, about
25 for each run: two runs where an epoch ended in between, else one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.disk import flush_folder
from drumline.data.ledger import Ledger, num_steps, to_json
from drumline.data.sharding import Cursor
from drumline.distributed.collectives import gather_json
from drumline.errors import log
from drumline.metrics.json_lines import JsonLines


class LedgerFile:
    """Gathers the ledgers of all ranks. Only rank 0 has a path."""

    def __init__(self, path: Path | None) -> None:
        self.ledger = Ledger()
        """This rank's own, since the last save."""
        self._path = path
        self._lines: JsonLines | None = None
        self._waiting: list[str] = []

    def start(self, *, step: int, cursor: Cursor, **facts: Any) -> None:
        """Record that the job starts from this step. `facts`: world_size, batch_size, samples (None where a stream's
        length is unknown), seed, shards."""
        position = {"step": step, "epoch": cursor.epoch, "position": cursor.position}
        self._write({"kind": "start", **position, **facts, "time": round(time.time(), 3)})

    def gather(self, *, step: int, device: torch.device) -> None:
        """Collective: write what all ranks have covered up to this step. `flush` follows before the checkpoint."""
        runs = self.ledger.take()
        ranks = gather_json(to_json(runs), device=device)
        if runs:
            self._write({"kind": "steps", "first": step - num_steps(runs) + 1, "last": step, "ranks": ranks})

    def flush(self) -> None:
        """Wait until all that was written is on the device; called by the thread that writes the checkpoint."""
        if self._lines is not None:
            self._try(self._lines.flush)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            self._waiting.append(json.dumps(record, separators=(",", ":")))
            self._try(self._write_waiting)

    def _write_waiting(self) -> None:
        assert self._path is not None
        if self._lines is None:
            self._lines = JsonLines(self._path)
            flush_folder(self._path.parent)
        while self._waiting:
            self._lines.append(self._waiting[0])
            del self._waiting[0]

    def _try(self, action: Callable[[], None]) -> None:
        """A ledger that cannot be written ends no run, as it is no part of what is computed: the line waits for the
        next save. (A disk that is full for it is full for the checkpoint, which does end the run.)"""
        try:
            action()
        except OSError as error:
            log.warning(f"the sample ledger {self._path} could not be written: {error.strerror}")
