"""`Task.predict` over a dataset: the predictions in the order of the samples, the same on any
number of ranks.

Every batch holds the same samples whatever the number of ranks. Ranks take turns, and rank 0 writes
what each has predicted, batch by batch, so that no rank holds the predictions of a whole dataset.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor

from drumline.base.errors import UsageError
from drumline.data.evaluation_loader import EvaluationLoader
from drumline.rank.collectives import check_same, gather_json, gather_on_main
from drumline.rank.torch_internals import pytree
from drumline.runs.events import as_json
from drumline.training.job.evaluation_job import (
    EvaluationJob,
    build_evaluation_job,
    with_local_data,
)
from drumline.training.manager import RunManager
from drumline.training.saved.saved_run import SavedRun, evaluation_data, restore_for_evaluation
from drumline.training.tasks.base import Task, evaluation_mode
from drumline.watch.heartbeat import Phase

Encoder = Callable[[Any, int], bytes]
"""From what `predict` returned for a batch of so many samples to bytes."""


def predict_run(
    saved: SavedRun, ddp: RunManager, data: str | None, *, encode: Encoder
) -> Iterator[bytes]:
    """Collective: the encoded predictions of every batch, in order, on rank 0; the others get none.
    With the weights that the run evaluates with (of EMA, for example). `data`: as for
    `evaluation_data`."""
    task = saved.task(with_local_data(saved.config, ddp))
    dataset = prediction_data(task, data)
    job = build_evaluation_job(saved.config, task, ddp, {"": dataset}, has_metrics=False)
    try:
        restore_for_evaluation(job, saved)
        yield from _predict(job, job.eval_loaders[""], encode)
    finally:
        job.close()


def prediction_data(task: Task, data: str | None) -> Any:
    """The only set of `evaluation_data`."""
    sets = list(evaluation_data(task, data).values())
    if len(sets) != 1:
        count = "no evaluation data" if not sets else "several evaluation sets"
        raise UsageError(
            f"{type(task).__name__}.eval_data() gives {count}",
            next_step="name a dataset: path/to/file.py:Class",
        )
    return sets[0]


@torch.no_grad()
def _predict(job: EvaluationJob, loader: EvaluationLoader, encode: Encoder) -> Iterator[bytes]:
    """Collective. Batch number n is that of rank n % world_size, so each round of all ranks is in
    order."""
    batches = loader.numbered()
    with evaluation_mode(job.task, job.model):
        while True:
            job.heartbeat.mark(Phase.EVALUATION)
            encoded = torch.empty(0, dtype=torch.uint8)
            if (batch := next(batches, None)) is not None:
                with job.autocast:
                    outputs = job.task.predict(job.model, job.task.on_device(batch.data))
                encoded = torch.frombuffer(
                    bytearray(encode(outputs, batch.size)), dtype=torch.uint8
                )
            sizes = gather_json(len(encoded))
            if not any(sizes):
                break
            parts = gather_on_main(encoded, sizes)
            yield from (part.numpy().tobytes() for part in parts if len(part))
    check_same(  # only a stream's: of anything else the samples were compared before
        {"the samples that they read": [loader.num_samples, loader.digest]},
        host=job.ddp.host,
        next_step="let every rank read the whole stream in one order: Drumline splits it by batches",
    )


# What is written: a line of JSON for each sample, or one array


def as_lines_of_json(outputs: Any, size: int) -> bytes:
    return b"".join(json.dumps(as_json(row)).encode() + b"\n" for row in rows_of(outputs, size))


def rows_of(outputs: Any, size: int) -> list[Any]:
    """One entry for each of `size` samples. A tensor or an array has the samples in its first
    dimension, a list has an entry for each, and a mapping or a tuple consists of such parts."""
    if isinstance(outputs, Mapping) and outputs:
        columns = {str(name): rows_of(part, size) for name, part in outputs.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(outputs, tuple) and outputs:
        return [list(row) for row in zip(*(rows_of(part, size) for part in outputs), strict=True)]
    if isinstance(outputs, Tensor | np.ndarray):
        _check_samples(outputs, size)
        return list(outputs.tolist())
    if isinstance(outputs, list) and len(outputs) == size:
        arrays = (Tensor, np.ndarray, np.generic)
        return [
            pytree.tree_map_only(arrays, lambda leaf: leaf.tolist(), output) for output in outputs
        ]
    raise _unusable(f"a {type(outputs).__name__}", size)


def _check_samples(outputs: Tensor | NDArray[Any], size: int) -> None:
    if outputs.ndim == 0 or len(outputs) != size:
        raise _unusable(f"a {type(outputs).__name__} of shape {list(outputs.shape)}", size)


def _unusable(what: str, size: int) -> UsageError:
    return UsageError(
        f"predict() returned {what} for a batch of {size} samples",
        next_step="return a tensor with the samples in its first dimension, a list with an entry for each sample, or a "
        "dict or tuple of these",
    )


def as_array(outputs: Any, size: int) -> bytes:
    """As a small .npy file."""
    if not isinstance(outputs, Tensor | np.ndarray):
        raise UsageError(
            f"predict() returned a {type(outputs).__name__}, and a .npy file holds one array",
            next_step="give --to a name that ends in .jsonl, or return one tensor",
        )
    _check_samples(outputs, size)
    if isinstance(outputs, Tensor):
        has_type = outputs.dtype is not torch.bfloat16  # numpy has no such type
        outputs = (outputs if has_type else outputs.float()).cpu().numpy()
    file = io.BytesIO()
    np.save(file, outputs, allow_pickle=False)
    return file.getvalue()


def write_array(file: BinaryIO, parts: Iterator[bytes]) -> int:
    """Put the arrays of all batches together, in a file of numpy's format; the number of samples,
    which is written at the end, is returned."""
    count = 0
    first: NDArray[Any] | None = None
    for part in parts:
        array = np.load(io.BytesIO(part), allow_pickle=False)
        if first is None:
            first = array[:0]
            _write_header(file, first, 0)
        if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
            raise UsageError(
                f"predictions of {first.dtype} {list(first.shape[1:])} are followed by {array.dtype} "
                f"{list(array.shape[1:])}, and a .npy file holds one array",
                next_step="give --to a name that ends in .jsonl",
            )
        file.write(array.tobytes())
        count += len(array)
    if first is not None:
        file.seek(0)
        _write_header(file, first, count)
    return count


def _write_header(file: BinaryIO, like: Any, count: int) -> None:
    """numpy leaves room in it for the length to grow."""
    header = {"descr": dtype_to_descr(like.dtype), "fortran_order": False}
    write_array_header_1_0(file, {**header, "shape": (count, *like.shape[1:])})
