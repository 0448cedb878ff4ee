"""The saves of a run, while training continues: the loop pauses for a copy of the state, and a
thread writes it.

    (entered)  the ranks that write are chosen, and make a small copy, so that the first save need not load and pin
    save_step  waits for the previous save, or skips this one (`checkpoint.when_busy`); the ledger is gathered, the
               state is captured, and the writer's thread starts
    _publish   in that thread: the mirror uploads the complete checkpoint; old ones are removed
    report     a finished checkpoint is reported, or the writer's error raised, by the loop after a later step

Rank 0 writes, or several ranks do, each a part (`checkpoint.writers`). Only rank 0 reports and
fails.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from torch import Tensor

from drumline.base.errors import log
from drumline.base.untrusted import flush_folder
from drumline.checkpoint import state
from drumline.checkpoint.optimizer_state import encode_state
from drumline.checkpoint.rank_states import gather_states
from drumline.checkpoint.retention import is_best, prune
from drumline.checkpoint.state import gather_rng
from drumline.checkpoint.store import Snapshot, WritingRank
from drumline.checkpoint.writer import CapturedState, CheckpointWriter
from drumline.data.sharding import Cursor, Ledger, Sharding, plan_step
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.collectives import all_sum, broadcast_json, gather_json
from drumline.runs.events import JsonLines
from drumline.runs.ledger_entries import LedgerEntry, num_steps
from drumline.training.job.evaluation_job import numbers
from drumline.training.job.job import Job, Progress
from drumline.training.job.optimizer import group_state
from drumline.training.replica_state import OUTER_FILE, REPLICAS_FILE, replica_state
from drumline.training.run_context import Periodic, RunContext, RunFacts, TaskHooks
from drumline.watch.heartbeat import Phase

if TYPE_CHECKING:
    from drumline.checkpoint.mirror import Mirror

FAILED_S = 5.0
"""How long a run that has failed waits for its mirror: a failure is to be reported soon."""


class Saver(Periodic):
    """Saves every `checkpoint.every_steps` and `checkpoint.every_epochs`, and at the end: writes
    the checkpoints of a run, one at a time, and before each the sample ledger."""

    name = "save"

    def __init__(
        self,
        context: RunContext,
        *,
        facts: RunFacts,
        check_state: Callable[[], str | None],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`check_state`, collective: the first tensor that is not finite, if there is one; or an
        error. `before`: the position of each rank of the group before (`KeptState`)."""
        settings = context.config.checkpoint
        super().__init__(
            context.progress, every_steps=settings.every_steps, every_epochs=settings.every_epochs
        )

        self.saved_step = context.progress.step
        """The latest step that is saved, or being saved."""

        self._before = before
        self._job = context.job
        self._context = context
        self._root = context.folder.checkpoints
        self._settings = settings
        self._facts = facts
        self._check_state = check_state

        ddp = context.job.ddp
        self._ledger_file = LedgerFile(context.folder.ledger if ddp.is_main_process() else None)
        self.ledger = self._ledger_file.ledger
        """What this rank has trained on since the last save: the loop adds to it."""

        self._mirror: Mirror | None = None
        if self._settings.mirror is not None and ddp.is_main_process():
            # few runs need it
            from drumline.training.between_steps.mirroring import make_mirror

            self._mirror = make_mirror(context, self._settings.mirror)

        self.writer = CheckpointWriter(
            self._root, WritingRank(ddp.rank, ddp.host), ddp.device, publish=self._publish
        )

        self._held: object = None
        """What must not be freed while it may be captured."""

        self._paused_at = 0.0
        self._paused_s = 0.0
        """How long the latest save has paused the loop."""

    def unsaved(self) -> dict[str, Any]:
        """The first step since the last save, its cursor, what this rank has trained on since, and
        as which part:

        {"first": 24, "cursor": {"epoch": 1, "position": 64}, "entries": [...], "sharding": {...}}
        """
        return {
            **self._ledger_file.since,
            "entries": self._ledger_file.unsaved(),
            "sharding": asdict(self._job.loader.sharding),
        }

    def __enter__(self) -> Self:
        """Collective: choose the ranks that write."""
        ddp = self._job.ddp
        who = self._settings.writers
        self._ledger_file.start(self._context, self._before)

        num_shards = 1 if self._job.sharded is None else self._job.sharded.plan.num_shards
        if (who != "one" or num_shards > 1) and ddp.world_size > 1:
            assert ddp.connection.store is not None
            self.writer.choose_writers(
                who, ddp.connection.store, local_rank=ddp.get_local_rank(), num_shards=num_shards
            )

        self.writer.rehearse()
        if self._mirror is not None:
            self._mirror.start()  # what an earlier start could not upload

        return self

    def run(self, context: RunContext) -> None:
        """Save after this step; if it was evaluated, with its metrics. The last step is always
        saved."""
        step = context.progress.step
        progress = context.progress
        metrics = numbers(progress.metrics) if progress.evaluated_step == step else {}
        self.save_step(metrics, must_save=step >= progress.last_step)

    def save_step(self, metrics: Mapping[str, float], *, must_save: bool) -> None:
        """Collective: save the state after this step, with the task's hooks before and after."""
        context = self._context
        step = context.progress.step
        heartbeat = context.job.heartbeat

        heartbeat.mark(Phase.SAVE)

        with context.throughput.paused("save"):
            self._paused_at = time.perf_counter()
            if self._skips(step, metrics, must_save=must_save):
                return

            self.report()  # waits for the previous save

            context.hooks.call("before_save")
            heartbeat.mark(Phase.SAVE)
            self.save(context.progress, metrics)

            self.saved_step = step
            context.hooks.call("after_save")

    def _skips(self, step: int, metrics: Mapping[str, float], *, must_save: bool) -> bool:
        """Collective: whether the previous save is still being written, and this one is not the
        best so far, as rank 0 sees it."""
        may_skip = {"wait": False, "skip": True}[self._settings.when_busy]
        if must_save or not may_skip:
            return False

        skips = False
        if self._job.ddp.is_main_process() and self.writer.is_busy:
            task = self._job.task
            skips = not is_best(
                self._root, metrics, metric=task.best_metric, higher_is_better=task.higher_is_better
            )

        if skips:
            self._context.note(
                f"skipped the save of step {step}: step {self.writer.step} is still being written"
            )

        return bool(broadcast_json(skips))

    def save(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Collective: copy what is to be saved, and start to write it. Training continues while a
        thread writes."""
        # First: a checkpoint must never contain steps that the ledger lacks.
        self._ledger_file.gather(progress)
        if self._job.sync is None:
            LiveBuffers(self._job.model).broadcast()

        non_finite = self._check_state()
        progress.saved_step = progress.step
        captured = self._capture(progress, metrics, non_finite)

        if not self.writer.is_writer:
            return

        # Kept until the next save: if the writer's thread freed the pinned memory of the sums while
        # a step is being captured, torch would count the capture as a use of it, and fail later.
        self._held = captured.complete

        with self._job.shared_weights():  # the copy is made in it
            kind = self.writer.start(captured, copies=self._settings.background)

        self._paused_s = time.perf_counter() - self._paused_at
        if kind == "none":
            self.report()

    def _capture(
        self, progress: Progress, metrics: Mapping[str, float], non_finite: str | None
    ) -> CapturedState:
        """Collective: what the writing ranks need for a checkpoint; only rank 0's is complete. All
        ranks already have rank 0's buffers. With a single rank this does not wait for its GPU."""
        job = self._job
        hooks = self._context.hooks
        device = job.ddp.device

        rng = gather_rng(device)
        by_rank = _gather_rank_states(job)

        # Being copied to the host: complete when a copy that is started later is.
        sums = all_sum(job.meter.peek()).to("cpu", non_blocking=device.type == "cuda")
        measured: dict[str, Any] = {"names": job.meter.names}
        document = {
            "step": progress.step,
            "cursor": asdict(progress.cursor),
            "saved_step": progress.saved_step,
            "measured": measured,
            "facts": dict(self._facts),
            "stop_asked": hooks.pending_reason(),
            "stopped": progress.stopped,
            "metrics": progress.metrics,
        }

        snapshot = live_state(job, hooks, document)

        def complete() -> None:
            """In the writer's thread, before the checkpoint is written."""
            measured.update(sums=sums.tolist())
            self._ledger_file.flush()

        return CapturedState(
            progress.step,
            live=snapshot.tensors,
            frozen={"rng": rng, **by_rank.tensors},
            documents={**snapshot.documents, **by_rank.documents},
            metrics=dict(metrics),
            non_finite=non_finite,
            complete=complete,
        )

    def report(self) -> None:
        """Report the checkpoint that was being written, or raise its error; waits for it:

        {"kind": "checkpoint", "step": 1800, "path": "...", "bytes": 660000, "copy": ..., "seconds": 0.033,
         "blocked_s": 0.006}
        """
        written = self.writer.take()
        if written is None:
            return

        paused_s = max(self._paused_s, written.copy_s)
        self._context.throughput.checkpoint_pause_s += paused_s

        self._context.reporter.report(
            "checkpoint",
            step=written.step,
            path=str(written.path),
            bytes=written.num_bytes,
            copy=written.copy,
            seconds=written.seconds,
            blocked_s=paused_s,
        )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and report it."""
        if self.writer.is_busy:
            self._job.heartbeat.mark(Phase.SAVE)

        self.report()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the checkpoint that is being written, however the loop ends. Its error never hides
        another one."""
        if self.writer.is_busy:
            self._job.heartbeat.mark(Phase.SAVE)

        try:
            if error is not None:
                self.writer.wait_after_failure()

            self.report()
        except Exception as also:
            if error is None:
                raise

            log.warning(also)
        finally:
            # A run that is preempted reports its save first: the launcher, and the other ranks,
            # wait for that only.
            is_preempted = self._context.progress.is_stopping and error is None
            if self._mirror is not None and not is_preempted:
                self._job.heartbeat.mark(Phase.SAVE)
                limit_s = math.inf if error is None else FAILED_S
                self._mirror.finish(min(self._settings.mirror_wait_s, limit_s))

    def close(self, limit_s: float) -> None:
        """Mirror the events of the end of the run, too; wait for that at most this long. Called also
        where the run ended before `__enter__` had."""
        self._ledger_file.close()
        if self._mirror is not None:
            self._mirror.close(min(self._settings.mirror_wait_s, limit_s))

    def _publish(self, newest: Path) -> None:
        """In the writer's thread, when a checkpoint is complete."""
        if self._mirror is not None:
            self._mirror.saved(newest)
        else:
            prune(self._root, self._context.retention, newest=newest)


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

    def start(self, context: RunContext, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record that the job starts from this step. `before`: the positions of the group
        before."""
        if self._path is not None:
            self._lines = JsonLines(self._path)
            flush_folder(self._path.parent)

        job = context.job
        train = context.config.train
        progress = context.progress
        self.since = {"first": progress.step + 1, "cursor": asdict(progress.cursor)}

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

        if before:
            self._write_unsaved(before, progress.step)
            lost = lost_steps(before, progress.step)
            if lost:
                record["lost"] = lost

        self._write(record)

    def _write_unsaved(self, before: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write what the ranks of the group before covered since the last save. Which samples that
        were follows from the cursor and the sizes of the global batches, also for a rank that is
        lost."""
        furthest = max(before, key=lambda rank: (rank["step"], rank["ledger"]["first"]))
        since = furthest["ledger"]
        first = since["first"]
        if step < first:
            return

        cursor = Cursor(**since["cursor"])
        batches = _global_batches(cursor, since["entries"])[: step - first + 1]
        split = msgspec.convert(since["sharding"], Sharding)

        ranks = []
        for rank in range(split.world_size):
            sharding = replace(split, rank=rank)
            covered = Ledger()
            for begin, size in batches:
                plan = plan_step(begin, length=begin.position + size, sharding=sharding)
                covered.add(plan)

            ranks.append(covered.take())

        self._write(
            {"kind": "steps", "first": first, "last": step, "ranks": ranks, "unsaved": True}
        )

    def unsaved(self) -> list[LedgerEntry]:
        """This rank's entries since the last save that all ranks took part in."""
        self._taken += self.ledger.take()
        return self._taken

    def gather(self, progress: Progress) -> None:
        """Collective: write what all ranks have covered up to this step. Call `flush` before the
        checkpoint. A step since the last save is then in the ledger, and no longer `unsaved`."""
        step = progress.step
        runs = self.unsaved()
        ranks = gather_json(runs)

        self._taken = []
        self.since = {"first": step + 1, "cursor": asdict(progress.cursor)}

        if runs:
            self._write(
                {"kind": "steps", "first": step - num_steps(runs) + 1, "last": step, "ranks": ranks}
            )

    def flush(self) -> None:
        """Wait until all lines are on disk; called by the thread that writes the checkpoint, before
        it does."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line on rank 0."""
        if self._lines is not None:
            self._lines.append(json.dumps(record, separators=(",", ":")))


def lost_steps(before: Sequence[Mapping[str, Any]], step: int) -> list[tuple[int, int, int]]:
    """Ranks of the group before, each with the first and the last step whose samples are in no
    weights: a lost rank's since the last round, and those of a replica that has to repeat some.

        [(2, 121, 130), (3, 121, 130)]
    """
    last_steps = {rank["ledger"]["sharding"]["rank"]: rank["step"] for rank in before}
    last_round = min(max(rank["finished_at"] for rank in before))
    num_ranks = before[0]["ledger"]["sharding"]["world_size"]

    lost = []
    for rank in range(num_ranks):
        last_in_weights = last_steps.get(rank, last_round)
        if last_in_weights < step:
            lost.append((rank, last_in_weights + 1, step))

    return lost


def _global_batches(cursor: Cursor, entries: Sequence[Sequence[int]]) -> list[tuple[Cursor, int]]:
    """The start and the size of the global batch of each step, from this cursor on."""
    batches = []
    for epoch, _, _, size, count in entries:
        if epoch != cursor.epoch:
            cursor = Cursor(epoch, 0)

        for _ in range(count):
            batches.append((cursor, size))
            cursor = Cursor(epoch, cursor.position + size)

    return batches


DATA_FILE = "data"
"""The file and document of a dataset's own state."""

COMM_FILE = "comm"
"""The file and document of `Job.comm`."""

_STATE_NAMES = {DATA_FILE: "the state_dict() of the training data"}


def live_state(job: Job, hooks: TaskHooks, document: Mapping[str, Any]) -> Snapshot:
    """The state of the job and its hooks, with this document of the progress, as a checkpoint has
    it. The tensors are those in use."""
    progress = {**document, "group_state": group_state(job.optimizer, job.group_settings)}
    snapshot = state.capture(job.model, job.optimizer, scaler=job.scaler, progress=progress)

    of_hooks = hooks.capture()
    snapshot.tensors.update(of_hooks.tensors)
    snapshot.documents.update(of_hooks.documents)

    outer = {} if job.sync is None else job.sync.outer_state()
    if outer:
        snapshot.tensors[OUTER_FILE] = outer

    return snapshot


def _gather_rank_states(job: Job) -> Snapshot:
    """Collective: every rank's state of what has one of its own: a dataset that keeps its position,
    PowerSGD, a replica of `--dist.sync`."""
    gathered = Snapshot({}, {})
    states = {
        DATA_FILE: job.loader.stream_state(),
        COMM_FILE: None if job.comm is None else job.comm.state_dict(),
        REPLICAS_FILE: replica_state(job),
    }

    for file, rank_state in states.items():
        if rank_state is None:
            continue

        tensors: dict[str, Tensor] = {}
        encoded = encode_state(rank_state, _STATE_NAMES.get(file, file), tensors)
        gathered.documents[file], tensors_by_rank = gather_states(encoded, tensors)

        if tensors_by_rank:
            gathered.tensors[file] = tensors_by_rank

    return gathered
