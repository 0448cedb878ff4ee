"""The trace of a run (`log.trace`): hashes of every sample and tensor at every step, to compare two
runs bit by bit.

One file a rank, RUN/trace/rank-NNNNN.jsonl, one line for each thing that happened:

- `start`: an attempt starts: world_size, pid, the step it starts from, and the tensors at that
  step;
- `step`: a step was taken: its epoch, the micro-batches of this rank, and the tensors after it;
- `evaluation`, `evaluated`: an evaluation begins, and ends with its metrics.

Tensors (rank 0 writes them) have their names in a checkpoint; `unsaved` are those that are in no
checkpoint.

    {"kind": "start", "step": 0, "world_size": 2, "pid": 4711, "tensors": {...}, "unsaved": {}}
    {"kind": "step", "step": 1, "epoch": 0, "batches": [...], "tensors": {...}, "unsaved": {}}
    {"kind": "evaluation", "step": 1}
    {"kind": "evaluated", "step": 1, "metrics": {"loss": 2.3}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from drumline.checkpoint.state import capture
from drumline.data.dataset import content_hash
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import Span, permute
from drumline.parallel.shards import whole
from drumline.rank.tensor_hash import as_bytes
from drumline.runs.events import EventLog
from drumline.runs.run_folder import writing_to
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import AnyStep

WITHOUT = "train without --log.trace"
NUM_BYTES = 8
"""The length of a hash."""


class TracedStep:
    """A train step that also writes one rank's trace. The batches are hashed as they are taken, the
    tensors when the step is done."""

    def __init__(self, inner: AnyStep, context: RunContext) -> None:
        self._inner = inner
        self._job = context.job
        self._progress = context.progress
        self._path = context.folder.trace_file(context.job.ddp.rank)
        self._seed = context.config.train.seed
        self._batches: list[dict[str, Any]] = []

        with writing_to(self._path, instead=WITHOUT):
            self._log = EventLog(self._path)

    def start(self) -> None:
        """Write the state that the attempt starts from."""
        self.write("start", world_size=self._job.ddp.world_size, pid=os.getpid(), **self._tensors())

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step, and its line in the trace."""
        self._batches = []
        self._inner(step._replace(micro_batches=self._hashed(step)))

        number = self._progress.step + 1
        epoch = step.plan.epoch
        self.write("step", step=number, epoch=epoch, batches=self._batches, **self._tensors())

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line, with the number of steps done."""
        with writing_to(self._path, instead=WITHOUT):
            self._log({"kind": kind, "step": self._progress.step, **fields})

    def close(self) -> None:
        self._log.close()

    def _hashed(self, step: Step) -> Iterator[MicroBatch]:
        """The same micro-batches, hashed as they are taken."""
        for span, micro in zip(step.plan.spans, step.micro_batches, strict=True):
            if span.counts:
                self._batches.append(self._record(span, micro, step.plan.epoch))

            yield micro

    def _record(self, span: Span, micro: MicroBatch, epoch: int) -> dict[str, Any]:
        """A micro-batch in the trace: its place in the epoch, its samples in the dataset, and a
        hash of each.

            {"low": 0, "high": 2, "indices": [7, 1031], "samples": ["9f86d081...", "60303ae2..."],
             "rest": "af1349b9..."}
        """
        samples, rest = hash_samples(micro.data, span.size)
        return {
            "low": span.low,
            "high": span.high,
            "indices": self._indices(span, epoch),
            "samples": samples,
            "rest": rest,
        }

    def _indices(self, span: Span, epoch: int) -> list[int] | None:
        """The samples of a micro-batch; None in a stream, where the position identifies them."""
        length = self._job.loader.num_samples
        if length is None:
            return None

        positions = np.arange(span.low, span.high, dtype=np.int64)
        indices: list[int] = permute(
            positions, length=length, seed=self._seed, epoch=epoch
        ).tolist()

        return indices

    def _tensors(self) -> dict[str, dict[str, str]]:
        """Collective if the model is sharded: on rank 0 the hashes of whole tensors:

        {"tensors": {"fc.weight": "9f86d081...", "optimizer.json": ...}, "unsaved": {...}}
        """
        job = self._job
        is_main = job.ddp.is_main_process()
        if not is_main and job.sharded is None:
            return {}

        state = capture(job.model, job.optimizer, scaler=job.scaler, progress={})

        hashes = {}
        for tensors in state.tensors.values():
            for name, tensor in tensors.items():
                hashes[name] = hash_tensor(whole(tensor))

        if not is_main:  # it has sent its shards
            return {}

        for name, document in state.documents.items():
            if name != "progress":
                hashes[f"{name}.json"] = hash_json(document)

        # Buffers that are in no checkpoint are lost with the process.
        saved = {*state.tensors["model"], *job.model.state_dict()}
        unsaved = {
            name: hash_tensor(buffer)
            for name, buffer in job.model.named_buffers()
            if name not in saved
        }

        return {"tensors": hashes, "unsaved": unsaved}


def hash_tensor(tensor: Tensor) -> str:
    """The hash of a tensor's type, shape and bits, on any device."""
    return _add(blake3(), tensor).hexdigest(NUM_BYTES)


def hash_json(document: Any) -> str:
    """The hash of a document, whatever the order of its keys."""
    return blake3(json.dumps(document, sort_keys=True).encode()).hexdigest(NUM_BYTES)


def hash_samples(batch: Any, size: int) -> tuple[list[str], str]:
    """One hash for each sample, of its row in every tensor whose first dimension is the batch's
    size; and one hash of the rest of the batch. Of (images [64, 1, 8, 8], labels [64]) each
    sample's is of its image and its label, and the rest is empty."""
    samples = [blake3() for _ in range(size)]
    rest = blake3()
    for place, leaf in _leaves(batch, ""):
        is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        tensor = torch.tensor(leaf) if is_array else leaf
        if not isinstance(tensor, Tensor):
            rest.update(place.encode() + content_hash(leaf))
            continue

        has_rows = tensor.dim() > 0 and tensor.shape[0] == size
        if has_rows and tensor.layout is torch.strided:
            for sample, row in zip(samples, tensor.detach().cpu(), strict=True):
                _add(sample.update(place.encode()), row)
        else:
            _add(rest.update(place.encode()), tensor)

    return [sample.hexdigest(NUM_BYTES) for sample in samples], rest.hexdigest(NUM_BYTES)


def _leaves(value: Any, place: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of a batch, and its path: `[0]`, `['tokens']`. An object of a user's class is
    replaced by its attributes: its repr may contain an address, which differs between runs."""
    if id(value) in above:
        return

    if isinstance(value, tuple | list):
        items = dict(enumerate(value))
    elif isinstance(value, Mapping):
        items = dict(value)
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type):
        items = vars(value)
    else:
        yield place, value
        return

    for name, item in items.items():
        yield from _leaves(item, f"{place}[{name!r}]", (*above, id(value)))


def _add(digest: blake3, tensor: Tensor) -> blake3:
    """Add a tensor's type, shape and bits to the hash."""
    dense = tensor.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()

    digest.update(f"{tensor.dtype}{list(tensor.shape)}:".encode())
    return digest.update(as_bytes(dense).numpy().data)
