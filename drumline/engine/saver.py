"""Saving checkpoints while training continues: the loop pauses for a copy of the state, and a thread writes it.

    (entered)  the ranks that write are chosen, and make a small copy, so that the first save need not load and pin
    prepare    waits for the previous save, or skips this one (`checkpoint.when_busy`)
    save       the ledger is gathered, the state is gathered and copied, and the writer's thread starts
    report     a finished checkpoint is reported, or the writer's error raised, by the loop after a later step

Rank 0 writes, or several ranks do, each a part (`checkpoint.writers`). Only rank 0 reports and fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from drumline.checkpoint import state, store, tensor_file
from drumline.checkpoint.copying import Copier, Copy, Writer
from drumline.checkpoint.optimizer_state import encode_state
from drumline.checkpoint.parts import Collector, SaveMessages, assign, write_own_part
from drumline.checkpoint.retention import is_best, prune
from drumline.checkpoint.state import capture_rng
from drumline.checkpoint.store import WritingRank, flush_folder
from drumline.data.ledger import Ledger, num_steps, to_json
from drumline.distributed.collectives import all_sum, gather_json, gather_tensors
from drumline.distributed.wrap import LiveBuffers
from drumline.engine.job import Job, Progress
from drumline.engine.run_context import RunContext
from drumline.errors import CheckpointError, log
from drumline.metrics.events import JsonLines
from drumline.net.sealed_store import SealedStore
from drumline.watch.heartbeat import Phase

# When a run fails, the remaining ranks finish the save in progress; how long they wait for a rank that has exited.
LAST_PARTS_S = 10.0
DATA_FILE = "data"
"""The file and document of a dataset's own state."""


class LedgerFile:
    """The sample ledger's file, `ledger.jsonl` in the run folder, written by rank 0 at each start and before each save.
    Only rank 0 has a path.

        {"kind":"start","step":0,"epoch":0,"position":0,"world_size":2,"batch_size":64,"samples":1437,"seed":0,...}
        {"kind":"steps","first":1,"last":23,"ranks":[[[0,0,32,64,22],[0,1408,1423,29,1]],[[0,32,64,64,22],...]]}

    A start has the step that it resumes from: later steps in lines above it were repeated and do not count. A save adds
    about 45 bytes, and 25 for each rank, or 50 if an epoch ended since the last save."""

    def __init__(self, path: Path | None) -> None:
        self.ledger = Ledger()
        """This rank's entries since the last save."""
        self._path = path
        self._lines: JsonLines | None = None
        self._waiting: list[str] = []

    def start(self, context: RunContext) -> None:
        """Record that the job starts from this step."""
        job, train, progress = context.job, context.config.train, context.progress
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
        }
        self._write(record)

    def gather(self, *, step: int, device: torch.device) -> None:
        """Collective: write what all ranks have covered up to this step. Call `flush` before the checkpoint."""
        runs = self.ledger.take()
        ranks = gather_json(to_json(runs), device=device)
        if runs:
            self._write({"kind": "steps", "first": step - num_steps(runs) + 1, "last": step, "ranks": ranks})

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
        """A ledger that cannot be written does not end the run, as it does not affect the result: the line is written
        with the next save. (If the disk is full, saving the checkpoint fails, which does end the run.)"""
        try:
            yield
        except OSError as error:
            log.warning(f"the sample ledger {self._path} could not be written: {error.strerror}")


@dataclass(frozen=True)
class GatheredState:
    """The content of a checkpoint."""

    live: dict[str, dict[str, Tensor]]
    """Shares memory with the model and the optimizer: the next step changes it."""
    own: dict[str, dict[str, Tensor]]
    """Belongs to this save only."""
    documents: dict[str, Any]
    """Without `sums`, which are added later."""
    sums: Tensor
    """The meter's sums, being copied to the host: complete when a later copy is."""


def gather_state(job: Job, progress: Progress, facts: Mapping[str, Any], *, is_writer: bool) -> GatheredState | None:
    """Collective: what the writing ranks need for a checkpoint; None on the others. Only rank 0's is complete. All
    ranks already have rank 0's buffers.

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
    """Collective: every rank's state of a dataset that keeps its own position; empty for any other. It is usually
    small, but may hold tensors of different shapes on each rank, which are sent as bytes."""
    own = job.loader.state_dict()
    if own is None:
        return store.Snapshot({}, {})
    tensors: dict[str, Tensor] = {}
    document = encode_state(own, "the state_dict() of the training data", tensors)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape), one.nbytes] for name, one in tensors.items()
    }
    pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    content = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    everyone = gather_json([document, shapes, content.numel()], device=job.ddp.device)
    padded = torch.zeros(max(size for _, _, size in everyone), dtype=torch.uint8)
    padded[: content.numel()] = content
    contents = gather_tensors(padded, device=job.ddp.device) if padded.numel() else [padded] * len(everyone)
    gathered = {}
    for rank, (_, theirs, _) in enumerate(everyone):
        start = 0
        for name, (dtype, shape, size) in theirs.items():
            piece = contents[rank][start : start + size].clone()
            gathered[f"{rank}/{name}"] = piece.view(getattr(torch, dtype)).reshape(shape)
            start += size
    documents = {DATA_FILE: {"ranks": [document for document, _, _ in everyone], "has_tensors": bool(gathered)}}
    return store.Snapshot({DATA_FILE: gathered} if gathered else {}, documents)


class Saver:
    """Writes the checkpoints of a run, one at a time, and before each the sample ledger."""

    def __init__(self, context: RunContext, *, facts: Mapping[str, Any], check_state: Callable[[], str | None]) -> None:
        """`check_state`, collective: the first tensor that is not finite, if there is one; or an error."""
        self.writer: Writer[dict[str, Any] | None] = Writer()
        self._job, self._context = context.job, context
        self._root, self._settings = context.folder.checkpoints, context.config.checkpoint
        self._facts, self._check_state = facts, check_state
        self._ledger_file = LedgerFile(context.folder.ledger if context.job.ddp.is_main_process() else None)
        self.ledger = self._ledger_file.ledger
        """What this rank has trained on since the last save: the loop adds to it."""
        self._copier = Copier(context.job.ddp.device)
        self._end = threading.Event()
        self._store: SealedStore | None = None
        self._writers: list[WritingRank] = []
        self._sums: Tensor | None = None
        self._num_saves = self._step = 0
        self._paused_at = self._paused_s = 0.0

    def __enter__(self) -> Self:
        """Collective: choose the ranks that write, rank 0 first."""
        ddp, who = self._job.ddp, self._settings.writers
        self._ledger_file.start(self._context)
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
        self._is_writer = ddp.rank in [writer.rank for writer in self._writers]
        if self._is_writer:
            self._copier.rehearse()
        return self

    def prepare(self, step: int, metrics: Mapping[str, float], *, must_save: bool) -> bool:
        """Collective: whether to save at this step. Rank 0 decides whether to wait for the previous save or to skip."""
        self._paused_at = time.perf_counter()
        if self._settings.when_busy == "skip" and not must_save:
            task, ddp = self._job.task, self._job.ddp
            skips = (
                ddp.is_main_process()
                and self.writer.is_busy
                and not is_best(self._root, metrics, metric=task.best_metric, higher_is_better=task.higher_is_better)
            )
            if skips:
                self._context.note(f"skipped the save of step {step}: step {self._step} is still being written")
            if ddp.world_size > 1:
                skips = bool(all_sum(torch.tensor([float(skips)], device=ddp.device)).item())
            if skips:
                return False
        self.report()
        return True

    def save(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Collective: copy what is to be saved, and start to write it."""
        assert self._writers, "a Saver is entered before it saves"
        # First: a checkpoint must never contain steps that the ledger lacks.
        self._ledger_file.gather(step=progress.step, device=self._job.ddp.device)
        LiveBuffers(self._job.model).broadcast()
        non_finite = self._check_state()
        began = time.perf_counter()
        self._num_saves += 1
        self._step = progress.saved_step = progress.step
        rank = self._job.ddp.rank
        gathered = gather_state(self._job, progress, self._facts, is_writer=self._is_writer)
        if gathered is None:
            return
        # Kept until the next save: if the writer's thread freed this pinned memory while a step is being captured,
        # torch would count the capture as a use of it, and fail later.
        self._sums = gathered.sums
        parts = {0: gathered.live}  # a rank that writes alone writes whole files
        if len(self._writers) > 1:
            parts = assign(gathered.live, [writer.rank for writer in self._writers])
        for group in parts[rank].values():
            tensor_file.num_bytes(group)  # refuses what cannot be saved
        copied = self._copier.take(parts[rank]) if self._settings.background else self._copier.as_they_are(parts[rank])
        if rank == 0:
            about = {"metrics": dict(metrics), "non_finite": non_finite}
            self.writer.start(partial(self._write, progress.step, gathered, copied, parts, about, began))
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
            paused_s = max(self._paused_s, written.pop("copy_s"))
            self._context.reporter.report("checkpoint", **written, blocked_s=paused_s)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the checkpoint that is being written, however the loop ends. Its error never hides another one."""
        if self.writer.is_busy:
            self._job.ddp.heartbeat.mark(Phase.SAVE)
        try:
            if error is not None and not self.writer.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
                self._end.set()
            self.report()
        except Exception as also:
            if error is None:
                raise
            log.warning(also)
        finally:
            self._ledger_file.close()

    def _write(
        self,
        step: int,
        gathered: GatheredState,
        copied: Copy,
        parts: Mapping[int, Mapping[str, Any]],
        about: Mapping[str, Any],
        began: float,
    ) -> dict[str, Any]:
        """On rank 0, in the writer's thread. Returns the fields of the event."""
        copy_s = copied.wait()
        gathered.documents["progress"]["measured"]["sums"] = gathered.sums.tolist()
        self._ledger_file.flush()  # before the checkpoint is complete
        me, *others = self._writers
        expected = {
            writer: {store.file_name(name): group for name, group in parts[writer.rank].items()} for writer in others
        }
        path = store.write(
            self._root,
            step,
            tensors={**copied.tensors, **gathered.own},
            documents=gathered.documents,
            stream=copied.stream,
            others=Collector(self._messages(), me, expected) if others else None,
            **about,
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
            log.warning(error)  # the new one is safe; an old one that remains is no reason to stop
        times = {"seconds": seconds, "copy_s": copy_s}
        return {"step": step, "path": str(path), "bytes": num_bytes, "copy": copied.kind, **times}

    def _write_part(self, copied: Copy, step: int) -> None:
        """On another writing rank, in the writer's thread."""
        copied.wait()
        me = WritingRank(self._job.ddp.rank, self._job.ddp.host)
        write_own_part(self._messages(), me, self._root, step, tensors=copied.tensors, stream=copied.stream)

    def _messages(self) -> SaveMessages:
        assert self._store is not None
        return SaveMessages(self._store, self._num_saves, end=self._end)
