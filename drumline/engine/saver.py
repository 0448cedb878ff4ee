"""Saving checkpoints while training continues: the loop pauses for a copy of the state, and a thread writes it.

    (entered)  which ranks write is settled, and they make a small copy, so that the first save need not load and pin
    prepare    the save before is done, or this one is skipped (`checkpoint.when_busy`)
    save       the state is gathered and copied, and the writer's thread starts
    report     a finished checkpoint is reported, or the writer's error raised: by the loop, after some later step
    finish     the same, waited for: before the next save, and at the end of the run

Rank 0 writes, or several ranks do, each a part (`checkpoint.writers`). Only rank 0 reports and fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from drumline.checkpoint import state, store, tensor_file
from drumline.checkpoint.copying import Copier, Copy, Kind, Writer
from drumline.checkpoint.optimizer_state import encode
from drumline.checkpoint.parts import Collector, SaveMessages, assign, write_own_part
from drumline.checkpoint.retention import is_best, prune
from drumline.checkpoint.state import capture_rng
from drumline.checkpoint.store import WritingRank, flush_folder
from drumline.data.ledger import Ledger, num_steps, to_json
from drumline.data.sharding import Cursor
from drumline.distributed.collectives import all_sum, gather_json, gather_tensors
from drumline.distributed.wrap import LiveBuffers
from drumline.engine.job import Job, Progress
from drumline.engine.run_context import RunContext
from drumline.errors import CheckpointError, log
from drumline.metrics.events import JsonLines
from drumline.net.sealed_store import SealedStore
from drumline.watch.heartbeat import Phase

# When a run fails, the ranks that are left finish the save in progress; one that has exited is not waited for longer.
LAST_PARTS_S = 10.0
DATA_FILE = "data"
"""The file and document of a dataset's own state."""


@dataclass(frozen=True)
class _Written:
    """A complete checkpoint."""

    step: int
    path: Path
    num_bytes: int
    seconds: float
    copy: Kind
    copy_s: float
    """How long the copy took the GPU."""


@dataclass(frozen=True)
class GatheredState:
    """What a checkpoint is to hold."""

    live: dict[str, dict[str, Tensor]]
    """Shares memory with the model and the optimizer: the next step changes it."""
    own: dict[str, dict[str, Tensor]]
    """Of this save alone."""
    documents: dict[str, Any]
    """Not yet with `sums` in them."""
    sums: Tensor
    """Of the meter, being copied to the host: complete when a copy that was started later is."""

    def all_documents(self) -> dict[str, Any]:
        """What the files hold, once `sums` is complete."""
        progress = self.documents["progress"]
        measured = {**progress["measured"], "sums": self.sums.tolist()}
        return {**self.documents, "progress": {**progress, "measured": measured}}


def gather_state(job: Job, progress: Progress, facts: Mapping[str, Any], *, is_writer: bool) -> GatheredState | None:
    """Collective: what the writing ranks need for a checkpoint; None on the others. Only rank 0's is complete. The
    ranks have rank 0's buffers already.

    With a single rank this does not wait for its GPU."""
    device = job.ddp.device
    rng = gather_tensors(capture_rng(device), device=device)
    data = _gather_data_state(job)
    sums = all_sum(job.meter.peek()).to("cpu", non_blocking=device.type == "cuda")
    if not is_writer:
        return None
    snapshot = state.capture(
        job.model,
        job.optimizer,
        scaler=job.scaler,
        progress={
            "step": progress.step,
            "cursor": asdict(progress.cursor),
            "saved_step": progress.saved_step,
            "measured": {"names": job.meter.names},
            "facts": dict(facts),
        },
    )
    generators = {f"rank-{rank:05d}": draws for rank, draws in enumerate(rng)}
    documents = {**snapshot.documents, **data.documents}
    return GatheredState(snapshot.tensors, {"rng": generators, **data.tensors}, documents, sums)


def _gather_data_state(job: Job) -> store.Snapshot:
    """Collective: every rank's state of a dataset that keeps its own position; empty for any other. It is small as a
    rule, but may hold tensors of any shape, which differ between ranks: they travel as bytes."""
    own = job.loader.state_dict()
    if own is None:
        return store.Snapshot({}, {})
    tensors: dict[str, Tensor] = {}
    document = encode(own, "the state_dict() of the training data", tensors)
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in packed.items()}
    pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in packed.values()]
    content = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    everyone = gather_json([document, shapes, content.numel()], device=job.ddp.device)
    padded = torch.zeros(max(size for _, _, size in everyone), dtype=torch.uint8)
    padded[: content.numel()] = content
    contents = [padded] * len(everyone)
    if padded.numel():
        contents = gather_tensors(padded, device=job.ddp.device)
    gathered = {
        f"{rank}/{name}": tensor
        for rank, content in enumerate(contents)
        for name, tensor in _unpacked(content, everyone[rank][1]).items()
    }
    documents = {DATA_FILE: {"ranks": [document for document, _, _ in everyone], "has_tensors": bool(gathered)}}
    return store.Snapshot({DATA_FILE: gathered} if gathered else {}, documents)


def _unpacked(content: Tensor, shapes: Mapping[str, tuple[str, list[int]]]) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        size = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).copy_(content[start : start + size])
        tensors[name] = tensor
        start += size
    return tensors


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self,
        context: RunContext,
        *,
        facts: Mapping[str, Any],
        ledger_file: LedgerFile,
        check_state: Callable[[], str | None],
    ) -> None:
        """`check_state`, collective: the first tensor that is not finite, if there is one; or an error."""
        self.writer: Writer[_Written | None] = Writer()
        self._job, self._reporter = context.job, context.reporter
        self._root, self._settings = context.folder.checkpoints, context.config.checkpoint
        self._facts = facts
        self._ledger_file = ledger_file
        self._check_state = check_state
        self._copier = Copier(context.job.ddp.device)
        self._end = threading.Event()
        self._store: SealedStore | None = None
        self._writers: list[WritingRank] = []
        self._sums: Tensor | None = None
        self._num_saves = 0
        self._step = 0
        self._paused_at = self._paused_s = 0.0

    def __enter__(self) -> Self:
        """Collective: choose the ranks that write, rank 0 first."""
        ddp, who = self._job.ddp, self._settings.writers
        self._writers = [WritingRank(0, ddp.host)]
        if who != "one" and ddp.world_size > 1:
            assert ddp.store is not None
            self._store = ddp.store.clone()
            ranks = gather_json([ddp.host, ddp.get_local_rank()], device=ddp.device)
            self._writers = [
                WritingRank(rank, host)
                for rank, (host, local_rank) in enumerate(ranks)
                if rank == 0 or who == "ranks" or local_rank == 0
            ]
        if self._is_writer():
            self._copier.rehearse()
        return self

    def is_writing(self) -> bool:
        """Any thread may ask."""
        return self.writer.is_busy

    def prepare(self, step: int, metrics: Mapping[str, float], *, must_save: bool) -> bool:
        """Collective: whether to save at this step. Waits for the save before, or skips this one."""
        self._paused_at = time.perf_counter()
        if self._settings.when_busy == "skip" and not must_save and self._is_skipped(step, metrics):
            return False
        self.report()
        return True

    def save(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Collective: copy what is to be saved, and start to write it."""
        assert self._writers, "a Saver is entered before it saves"
        LiveBuffers(self._job.model).broadcast()
        non_finite = self._check_state()
        began = time.perf_counter()
        self._num_saves += 1
        self._step = progress.saved_step = progress.step
        rank = self._job.ddp.rank
        gathered = gather_state(self._job, progress, self._facts, is_writer=self._is_writer())
        if gathered is None:
            return
        # Held until the next save: were the writer's thread to free this pinned memory while a step is being captured,
        # torch would take the capture for a use of it, and fail later.
        self._sums = gathered.sums
        parts = {0: gathered.live}  # a rank that writes alone writes whole files
        if len(self._writers) > 1:
            parts = assign(gathered.live, [writer.rank for writer in self._writers])
        for group in parts[rank].values():
            tensor_file.num_bytes(group)  # refuses what cannot be saved
        copied = self._copier.take(parts[rank]) if self._settings.background else self._copier.as_they_are(parts[rank])
        if rank == 0:
            self.writer.start(
                partial(self._write, gathered, copied, parts, dict(metrics), non_finite, progress.step, began)
            )
        else:
            self.writer.start(partial(self._write_part, copied, progress.step))
        if copied.kind == "none":
            self.writer.wait()
        self._paused_s = time.perf_counter() - self._paused_at
        if copied.kind == "none":
            self.report()

    def report(self) -> None:
        """Report the checkpoint that was being written, or raise its error; waits for it."""
        if (written := self.writer.take()) is not None:
            self._reporter.report(
                "checkpoint",
                step=written.step,
                path=str(written.path),
                bytes=written.num_bytes,
                seconds=written.seconds,
                copy=written.copy,
                blocked_s=max(self._paused_s, written.copy_s),
            )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and report it."""
        if self.writer.is_busy:
            self._job.ddp.heartbeat.mark(Phase.SAVE)
        self.report()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """However the loop ends, finish the checkpoint that is being written. Its error never hides another."""
        if error is None:
            self.finish()
            return
        if self.writer.is_busy:
            self._job.ddp.heartbeat.mark(Phase.SAVE)
        if not self.writer.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
            self._end.set()
        try:
            self.report()
        except Exception as also:
            log.warning(also)

    def _is_skipped(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Collective: rank 0 decides for all."""
        task, ddp = self._job.task, self._job.ddp
        skips = (
            ddp.is_main_process()
            and self.writer.is_busy
            and not is_best(self._root, metrics, metric=task.best_metric, higher_is_better=task.higher_is_better)
        )
        if skips:
            message = f"skipped the save of step {step}: step {self._step} is still being written"
            self._reporter.report("note", step=step, message=message)
        if ddp.world_size == 1:
            return skips
        return bool(all_sum(torch.tensor([float(skips)], device=ddp.device)).item())

    def _is_writer(self) -> bool:
        return self._job.ddp.rank in [writer.rank for writer in self._writers]

    def _write(
        self,
        gathered: GatheredState,
        copied: Copy,
        parts: Mapping[int, Mapping[str, Any]],
        metrics: Mapping[str, float],
        non_finite: str | None,
        step: int,
        began: float,
    ) -> _Written:
        """On rank 0, in the writer's thread."""
        copy_s = copied.wait()
        self._ledger_file.flush()  # first: a checkpoint never knows of steps that the ledger lacks
        path = store.write(
            self._root,
            step,
            tensors={**copied.tensors, **gathered.own},
            documents=gathered.all_documents(),
            metrics=metrics,
            non_finite=non_finite,
            stream=copied.stream,
            others=self._collector(parts),
        )
        seconds = time.perf_counter() - began
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        task, keep = self._job.task, self._settings
        try:
            prune(
                self._root,
                newest=path,
                keep_last=keep.keep_last,
                keep_best=keep.keep_best,
                metric=task.best_metric,
                higher_is_better=task.higher_is_better,
            )
        except CheckpointError as error:
            log.warning(error)  # the new one is safe; that an old one stays is no reason to stop
        return _Written(step, path, num_bytes, seconds, copied.kind, copy_s)

    def _write_part(self, copied: Copy, step: int) -> None:
        """On another writing rank, in the writer's thread."""
        copied.wait()
        ddp = self._job.ddp
        write_own_part(
            self._telling(),
            WritingRank(ddp.rank, ddp.host),
            self._root,
            step,
            tensors=copied.tensors,
            stream=copied.stream,
        )

    def _collector(self, parts: Mapping[int, Mapping[str, Any]]) -> Collector | None:
        me, *others = self._writers
        if not others:
            return None
        expected = {
            writer: {store.file_name(name): group for name, group in parts[writer.rank].items()} for writer in others
        }
        return Collector(self._telling(), me, expected)

    def _telling(self) -> SaveMessages:
        assert self._store is not None
        return SaveMessages(self._store, self._num_saves, end=self._end)


class LedgerFile:
    """The sample ledger on file: `ledger.jsonl` in the run folder, written by rank 0 at each start and before each
    save. Only rank 0 has a path.

        {"kind":"start","step":0,"epoch":0,"position":0,"world_size":2,"batch_size":64,"samples":1437,"seed":0,...}
        {"kind":"steps","first":1,"last":23,"ranks":[[[0,0,32,64,22],[0,1408,1423,29,1]],[[0,32,64,64,22],...]]}

    A start names the step that it resumes from, so later steps above it in the file were repeated and do not count. A
    save costs about 45 bytes and, for each rank, 25 or, where an epoch ended in between, 50."""

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
