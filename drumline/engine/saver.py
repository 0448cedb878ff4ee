"""Saving, as the loop sees it: it stops for a copy of the state, and learns later that the checkpoint stands.

    (entered)  who writes is settled, and the writers rehearse a copy, so that the first save need not load and pin
    make_way   the save before is done, or this one is left out (`checkpoint.when_busy`)
    save       the state is gathered and copied, and the writer's thread begins
    take_news  what the writer has done is reported, or its error raised: from the loop, after some later step
    finish     the same, waited for: before the next save, and at the end of the run

Rank 0 writes, or several ranks do, each a share (`checkpoint.writers`). Only rank 0 reports and fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.copying import Copier, Copy, Kind
from drumline.checkpoint.parts import Collector, Telling, WritingRank, contribute, deal
from drumline.checkpoint.retention import is_best, prune
from drumline.checkpoint.writer import Writer
from drumline.config.schema import CheckpointConfig
from drumline.distributed.buffers import LiveBuffers
from drumline.distributed.collectives import all_sum, gather_json
from drumline.engine.job import Job
from drumline.engine.ledger_file import LedgerFile
from drumline.engine.saving import Progress, State, gather_state
from drumline.errors import CheckpointError
from drumline.launch.node.sealed_store import SealedStore
from drumline.log import log
from drumline.metrics.events import Reporter
from drumline.watch.beats.phase import Phase

# When a run fails, the ranks that are left finish the save in hand; one that is gone is not waited for longer.
LAST_PARTS_S = 10.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that stands."""

    step: int
    path: Path
    num_bytes: int
    seconds: float
    copy: Kind
    copy_s: float
    """How long the copy took the GPU."""


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self,
        job: Job,
        *,
        root: Path,
        settings: CheckpointConfig,
        facts: Mapping[str, Any],
        reporter: Reporter,
        ledger_file: LedgerFile | None = None,
        check_state: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`check_state`, collective: the first tensor that is not finite, if one is; or an error."""
        self.writer: Writer[Saved | None] = Writer()
        self._job = job
        self._root = root
        self._settings = settings
        self._facts = facts
        self._reporter = reporter
        self._ledger_file = ledger_file
        self._check_state = check_state
        self._copier = Copier(job.ddp.device)
        self._end = threading.Event()
        self._store: SealedStore | None = None
        self._writers: list[WritingRank] = []
        self._sums: Tensor | None = None
        self._num_saves = 0
        self._step = 0
        self._stopped_at = self._stopped_s = 0.0

    def is_writing(self) -> bool:
        """Any thread may ask."""
        return self.writer.is_busy

    def make_way(self, step: int, metrics: Mapping[str, float], *, must_save: bool) -> bool:
        """Collective: whether the save of this step can begin. Waits for the one before, or this one is left out."""
        self._stopped_at = time.perf_counter()
        if self._settings.when_busy == "skip" and not must_save and self._is_left_out(step, metrics):
            return False
        self.take_news()
        return True

    def save(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Collective: copy what is to be saved, and begin to write it."""
        assert self._writers, "a Saver is entered before it saves"
        LiveBuffers(self._job.model).broadcast()
        non_finite = self._check_state()
        began = time.perf_counter()
        self._num_saves += 1
        self._step = progress.saved_step = progress.step
        me = self._job.ddp.rank
        state = gather_state(self._job, progress, self._facts, is_writer=self._is_writer())
        if state is None:
            return
        # Held until the next save: were the writer's thread to give this pinned memory back while a step is being
        # captured, torch would take the capture for a use of it, and fail later.
        self._sums = state.sums
        shares = deal_to(self._writers, state.live)
        copied = self._copy(shares[me])
        if me == 0:
            self.writer.start(
                partial(self._write, state, copied, shares, dict(metrics), non_finite, progress.step, began)
            )
        else:
            self.writer.start(partial(self._contribute, copied, progress.step))
        if copied.kind == "none":
            self.writer.wait()
        self._stopped_s = time.perf_counter() - self._stopped_at
        if copied.kind == "none":
            self.take_news()

    def take_news(self) -> None:
        """Report the checkpoint that was being written, or raise what went wrong; waits for it."""
        if (saved := self.writer.take()) is not None:
            self._reporter.report(
                "checkpoint",
                step=saved.step,
                path=str(saved.path),
                bytes=saved.num_bytes,
                seconds=saved.seconds,
                copy=saved.copy,
                blocked_s=max(self._stopped_s, saved.copy_s),
            )

    def finish(self) -> None:
        """Wait for the checkpoint in hand, if there is one; those who watch are told so."""
        if self.writer.is_busy:
            self._job.ddp.beat.mark(Phase.SAVE)
        self.take_news()

    def __enter__(self) -> Self:
        """Collective."""
        self._writers = self._choose_writers()
        if self._is_writer():
            self._copier.rehearse()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """However the loop ends, the checkpoint in hand is finished first. Its own error never hides another."""
        if error is None:
            self.finish()
            return
        if self.writer.is_busy:
            self._job.ddp.beat.mark(Phase.SAVE)
        if not self.writer.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
            self._end.set()
        try:
            self.take_news()
        except Exception as also:
            log.warning(also)

    def _is_left_out(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Collective: rank 0 decides, and all know."""
        task, decides = self._job.task, self._job.ddp.is_main_process()
        leaves_out = decides and self.writer.is_busy
        if leaves_out:
            leaves_out = not is_best(
                self._root, metrics, metric=task.best_metric, higher_is_better=task.higher_is_better
            )
        if leaves_out:
            message = (
                f"the save of step {step} was left out: that of step {self._step} is still being written"
            )
            self._reporter.report("note", step=step, message=message)
        if self._job.ddp.world_size == 1:
            return leaves_out
        return bool(all_sum(torch.tensor([float(leaves_out)], device=self._job.ddp.device)).item())

    def _choose_writers(self) -> list[WritingRank]:
        """Collective: rank 0 first."""
        ddp, who = self._job.ddp, self._settings.writers
        if who == "one" or ddp.world_size == 1:
            return [WritingRank(0, ddp.host)]
        assert ddp.store is not None
        self._store = ddp.store.clone()
        ranks = gather_json([ddp.host, ddp.get_local_rank()], device=ddp.device)
        return [
            WritingRank(rank, host)
            for rank, (host, local_rank) in enumerate(ranks)
            if rank == 0 or who == "ranks" or local_rank == 0
        ]

    def _is_writer(self) -> bool:
        return self._job.ddp.rank in [writer.rank for writer in self._writers]

    def _copy(self, live: dict[str, dict[str, Tensor]]) -> Copy:
        for group in live.values():
            tensor_file.num_bytes(group)  # what cannot be saved is refused here
        return self._copier.take(live) if self._settings.background else self._copier.as_they_are(live)

    def _write(
        self,
        state: State,
        copied: Copy,
        shares: Mapping[int, Mapping[str, Any]],
        metrics: Mapping[str, float],
        non_finite: str | None,
        step: int,
        began: float,
    ) -> Saved:
        """On rank 0, beside the loop."""
        copy_s = copied.wait()
        if self._ledger_file is not None:  # first: a checkpoint never knows of steps that the ledger lacks
            self._ledger_file.flush()
        path = store.write(
            self._root,
            step,
            tensors={**copied.tensors, **state.own},
            documents=state.all_documents(),
            metrics=metrics,
            non_finite=non_finite,
            stream=copied.stream,
            others=self._collector(shares),
        )
        seconds = time.perf_counter() - began
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self._let_old_ones_go(path)
        return Saved(step, path, num_bytes, seconds, copied.kind, copy_s)

    def _contribute(self, copied: Copy, step: int) -> None:
        """On another rank that writes."""
        copied.wait()
        ddp = self._job.ddp
        contribute(
            self._telling(),
            WritingRank(ddp.rank, ddp.host),
            self._root,
            step,
            tensors=copied.tensors,
            stream=copied.stream,
        )

    def _collector(self, shares: Mapping[int, Mapping[str, Any]]) -> Collector | None:
        me, *others = self._writers
        if not others:
            return None
        expected = {
            writer: {store.file_name(name): group for name, group in shares[writer.rank].items()}
            for writer in others
        }
        return Collector(self._telling(), me, expected)

    def _telling(self) -> Telling:
        assert self._store is not None
        return Telling(self._store, self._num_saves, end=self._end)

    def _let_old_ones_go(self, newest: Path) -> None:
        task, keep = self._job.task, self._settings
        try:
            prune(
                self._root,
                newest=newest,
                keep_last=keep.keep_last,
                keep_best=keep.keep_best,
                metric=task.best_metric,
                higher_is_better=task.higher_is_better,
            )
        except CheckpointError as error:
            log.warning(error)  # the new one is safe; that an old one stays is no reason to stop


def deal_to(
    writers: Sequence[WritingRank], live: dict[str, dict[str, Tensor]]
) -> dict[int, dict[str, dict[str, Tensor]]]:
    """What each rank writes; one that writes alone writes whole files."""
    return {0: live} if len(writers) == 1 else deal(live, [writer.rank for writer in writers])
