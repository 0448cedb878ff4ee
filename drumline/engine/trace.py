"""The trace of a run (`log.trace`): hashes of every sample and tensor at every step, to compare two runs bit by bit.

One file a rank, RUN/trace/rank-NNNNN.jsonl, one line for each thing that happened:

- `start`: an attempt begins: world_size, pid, the step it goes on from, and the tensors as they then are;
- `step`: a step was taken: its epoch, the micro-batches of this rank, and the tensors after it;
- `evaluation`, `evaluated`: one begins, and ends with its metrics.

Tensors (rank 0 writes them) have the names that they have in a checkpoint; `unsaved` are those that no checkpoint
holds. Without `log.trace` nothing of this is there: the loop takes another kind of step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from drumline.checkpoint.state import capture
from drumline.data.permutation import permute
from drumline.data.sharding import Span, StepPlan
from drumline.data.steps import MicroBatch, Step
from drumline.engine.job import Job
from drumline.engine.saving import Progress
from drumline.engine.steps.kind import AnyStep
from drumline.engine.trace_hashes import hash_json, hash_samples, hash_tensor
from drumline.errors import TrainingError
from drumline.metrics.events import EventLog


class Trace:
    """Writes one rank's trace."""

    def __init__(self, path: Path, job: Job, progress: Progress, *, seed: int) -> None:
        self._path = path
        self._job = job
        self._progress = progress
        self._seed = seed
        self._batches: list[dict[str, Any]] = []
        try:
            self._log = EventLog(path)
        except OSError as error:
            raise self._not_written(error) from error

    def start(self) -> None:
        """An attempt begins, from where progress stands."""
        self._write("start", world_size=self._job.ddp.world_size, pid=os.getpid(), **self._tensors())

    def begin_evaluation(self) -> None:
        self._write("evaluation")

    def end_evaluation(self, metrics: Mapping[str, float]) -> None:
        self._write("evaluated", metrics=metrics)

    def follow(self, step: Step) -> Step:
        """The same step; its micro-batches are looked at when they are taken."""
        self._batches = []
        return step._replace(micro_batches=self._look_at(step))

    def end_step(self, plan: StepPlan) -> None:
        """A step was taken, of which the loop has made no note yet."""
        self._write(
            "step", step=self._progress.step + 1, epoch=plan.epoch, batches=self._batches, **self._tensors()
        )

    def close(self) -> None:
        self._log.close()

    def _look_at(self, step: Step) -> Iterator[MicroBatch]:
        for span, micro in zip(step.plan.spans, step.micro_batches, strict=True):
            if span.counts:
                self._batches.append(self._batch(span, micro, step.plan.epoch))
            yield micro

    def _batch(self, span: Span, micro: MicroBatch, epoch: int) -> dict[str, Any]:
        samples, rest = hash_samples(micro.data, span.size)
        return {
            "low": span.low,
            "high": span.high,
            "indices": self._indices(span, epoch),
            "samples": samples,
            "rest": rest,
        }

    def _indices(self, span: Span, epoch: int) -> list[int] | None:
        length = getattr(self._job.loader, "num_samples", None)
        if length is None:  # a stream: the position says which sample it is
            return None
        positions = np.arange(span.low, span.high, dtype=np.int64)
        indices: list[int] = permute(positions, length=length, seed=self._seed, epoch=epoch).tolist()
        return indices

    def _tensors(self) -> dict[str, dict[str, str]]:
        job = self._job
        if not job.ddp.is_main_process():
            return {}
        state = capture(job.model, job.optimizer, scaler=job.scaler, progress={})
        hashes = {name: hash_tensor(one) for group in state.tensors.values() for name, one in group.items()}
        documents = {
            f"{name}.json": hash_json(one) for name, one in state.documents.items() if name != "progress"
        }
        return {"tensors": hashes | documents, "unsaved": self._unsaved(state.tensors["model"])}

    def _unsaved(self, saved: Mapping[str, Tensor]) -> dict[str, str]:
        """Buffers that are no part of a checkpoint: what they hold is lost with the process."""
        known = {*saved, *self._job.model.state_dict()}
        buffers = self._job.model.named_buffers()
        return {name: hash_tensor(buffer) for name, buffer in buffers if name not in known}

    def _write(self, kind: str, **fields: Any) -> None:
        try:
            self._log({"kind": kind, "step": self._progress.step, **fields})
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"the trace {self._path} could not be written: {error.strerror}",
            next_step="make room there, use another --run DIR, or train without --log.trace",
        )


class TracedStep:
    """A train step that is traced; to the loop it is the same."""

    def __init__(self, inner: AnyStep, trace: Trace) -> None:
        self._inner = inner
        self._trace = trace
        self.grad_norm: Tensor | None = None

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step, and its line in the trace."""
        self._inner(self._trace.follow(step))
        self.grad_norm = self._inner.grad_norm
        self._trace.end_step(step.plan)
