"""The sample ledger's file: what all ranks have trained on, written before each save."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drumline.base.errors import log
from drumline.checkpoint.store import flush_folder
from drumline.data.ledger import Ledger
from drumline.data.sharding import Cursor, Sharding, plan_step
from drumline.rank.collectives import gather_json
from drumline.runs.events import JsonLines
from drumline.runs.ledger_entries import LedgerEntry, num_steps, to_json
from drumline.training.job.job import Progress
from drumline.training.run_context import RunContext


class LedgerFile:
    """The sample ledger's file, `ledger.jsonl` in the run folder, written by rank 0 at each start
    and before each save. Only rank 0 has a path.

        {"kind":"start","step":0,"epoch":0,"position":0,"world_size":2,"batch_size":64,"samples":1437,"seed":0,...}
        {"kind":"steps","first":1,"last":23,"ranks":[[[0,0,32,64,22],[0,1408,1423,29,1]],[[0,32,64,64,22],...]]}

    A start has the step that it resumes from: later steps in lines above it were repeated and do
    not count. A save adds about 45 bytes, and 25 for each rank, or 50 if an epoch ended since the
    last save. Where nodes continue without a lost one, the steps since the last save are `unsaved`,
    and the start after them has what was `lost`: ranks, each with the first and last step whose
    samples are in no weights."""

    def __init__(self, path: Path | None) -> None:
        self.ledger = Ledger()
        """This rank's entries since the last save."""
        self.since: dict[str, Any] = {}
        """The first step that is not written yet, and its cursor."""
        self._taken: list[LedgerEntry] = []
        self._path = path
        self._lines: JsonLines | None = None
        self._waiting: list[str] = []

    def start(self, context: RunContext, before: Sequence[Mapping[str, Any] | None] = ()) -> None:
        """Record that the job starts from this step. `before`: what each rank keeps of the group
        before this one."""
        job = context.job
        train = context.config.train
        progress = context.progress
        self.since = {"first": progress.step + 1, "cursor": asdict(progress.cursor)}
        lost = self._end_group(before, progress.step)
        record = {
            "kind": "start",
            "step": progress.step,
            **asdict(progress.cursor),
            "world_size": job.ddp.world_size,
            "batch_size": job.batch.size,
            "samples": job.loader.num_samples,  # None: the length of a stream is unknown
            "seed": train.seed,
            "shards": train.shards if train.exact == "elastic" else None,
            "time": round(time.time(), 3),
            **({"lost": lost} if lost else {}),
        }
        self._write(record)

    def _end_group(
        self, before: Sequence[Mapping[str, Any] | None], step: int
    ) -> list[tuple[int, int, int]]:
        """Write what the ranks of the group before covered since the last save. Which samples that
        were follows from the cursor and the sizes of the global batches, also for a rank that is
        lost. Returns which steps of which ranks are lost."""
        kept_states = [state for state in before if state is not None]
        if not kept_states:
            return []
        since = max(kept_states, key=lambda state: (state["step"], state["ledger"]["first"]))[
            "ledger"
        ]
        first = since["first"]
        cursor = Cursor(**since["cursor"])
        split = dict(since["sharding"])
        batches = _global_batches(cursor, since["entries"])[: step - first + 1]
        if split["sizes"]:
            split["sizes"] = tuple(split["sizes"])
        ranks = []
        for rank in range(split["world_size"]):
            covered = Ledger()
            sharding = Sharding(**{**split, "rank": rank})
            for begin, size in batches:
                covered.add(plan_step(begin, length=begin.position + size, sharding=sharding))
            ranks.append(to_json(covered.take()))
        if step >= first:
            self._write(
                {"kind": "steps", "first": first, "last": step, "ranks": ranks, "unsaved": True}
            )
        in_weights = {state["ledger"]["sharding"]["rank"]: state["step"] for state in kept_states}
        round_at = min(max(state["finished_at"] for state in kept_states))
        ends = [(rank, in_weights.get(rank, round_at)) for rank in range(len(ranks))]
        return [(rank, end + 1, step) for rank, end in ends if end < step]

    def unsaved(self) -> list[LedgerEntry]:
        """This rank's entries since the last save that all ranks took part in."""
        self._taken += self.ledger.take()
        return self._taken

    def gather(self, progress: Progress, *, device: torch.device) -> None:
        """Collective: write what all ranks have covered up to this step. Call `flush` before the
        checkpoint."""
        step = progress.step
        runs = self.unsaved()
        ranks = gather_json(to_json(runs), device=device)
        self._taken = []
        self.since = {"first": step + 1, "cursor": asdict(progress.cursor)}
        if runs:
            self._write(
                {"kind": "steps", "first": step - num_steps(runs) + 1, "last": step, "ranks": ranks}
            )

    def flush(self) -> None:
        """Wait until all lines are on disk; called by the thread that writes the checkpoint."""
        if self._lines is not None:
            with self._errors_as_warnings():
                self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        self._waiting.append(json.dumps(record, separators=(",", ":")))
        with self._errors_as_warnings():
            if self._lines is None:
                self._lines = JsonLines(self._path)
                flush_folder(self._path.parent)
            while self._waiting:
                self._lines.append(self._waiting[0])
                del self._waiting[0]

    @contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """A ledger that cannot be written does not end the run, as it does not affect the result:
        the line is written with the next save. (If the disk is full, saving the checkpoint fails,
        which does end the run.)"""
        try:
            yield
        except OSError as error:
            log.warning(f"the sample ledger {self._path} could not be written: {error.strerror}")


def _global_batches(cursor: Cursor, entries: Sequence[Sequence[int]]) -> list[tuple[Cursor, int]]:
    """The start and the size of the global batch of each step, from this cursor on."""
    batches = []
    for epoch, _, _, size, count in entries:
        start = cursor.position if epoch == cursor.epoch else 0
        batches += [(Cursor(epoch, start + number * size), size) for number in range(count)]
        cursor = Cursor(epoch, start + count * size)
    return batches
