"""A checkpoint of a run, with its task and the settings it was trained with: for `drumline.load`
and `evaluate`.

    open_run       finds the checkpoint, checks every byte of it, and loads its task
    load_model     the model alone, with its weights, for `drumline.load`
    evaluate_run   the metrics, as the run itself computes them
    predict_run    what `Task.predict` returns for each batch, as lines of JSON or an array
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor, nn

from drumline.base.errors import CheckpointError, UsageError, as_list
from drumline.base.text import print_message
from drumline.base.user_code import is_class_spec
from drumline.checkpoint import state, store
from drumline.checkpoint.mirrored_run import CHECKPOINTS, opened_run
from drumline.checkpoint.retention import best, ranked
from drumline.config import Layers
from drumline.config.fields import annotation_of, is_in_task, task_fields
from drumline.config.flags import Layer, Setting, check_layer
from drumline.config.schema import Config
from drumline.data.loader import EvaluationLoader
from drumline.data.sharding import Cursor
from drumline.rank.collectives import check_same, gather_json, gather_on_main
from drumline.rank.determinism import keeping_rng
from drumline.rank.torch_internals import pytree
from drumline.runs import catalog
from drumline.runs.events import as_json, read_events
from drumline.runs.run_folder import RunFolder
from drumline.training.job.evaluation_job import (
    EvaluationJob,
    build_evaluation_job,
    evaluate,
    evaluation_sets,
    with_local_data,
)
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager
from drumline.training.resume import check_contents
from drumline.training.run_context import HOOKS_FILE, make_hooks
from drumline.training.saved.exported_weights import average_in, weights_in
from drumline.training.tasks.base import Task, evaluation_mode
from drumline.training.tasks.built_in import check_constructor, dataset_for, load_task, resolve_task
from drumline.watch.heartbeat import Phase


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and what it is of: the task that was trained, with its settings."""

    checkpoint: Path
    progress: Progress
    spec: str
    """The task as the user named it."""

    task: type[Task]
    config: Config
    """The settings of the run, and those that override them."""

    @property
    def step(self) -> int:
        return self.progress.step


def open_run(
    run: Path,
    which: str | int,
    *,
    task: type[Task] | str | None = None,
    overrides: Layer | None = None,
    prints: bool = True,
) -> SavedRun:
    """The `best` or `last` checkpoint of a run folder, or that of a step. It imports the task's own
    code.

    `task`: in place of the one that the run was started with, for example where its file has moved.
    `overrides`: settings that override those of the checkpoint. `prints`: as in `find_checkpoint`."""
    checkpoint = find_checkpoint(run, which, prints=prints)
    document = catalog.read_document(checkpoint, "progress")
    facts = document["facts"]
    progress = Progress(document["step"], Cursor(**document["cursor"]))

    spec = task if isinstance(task, str) else str(facts["task"])

    # Without a task of the user's the code is imported that the checkpoint names.
    task_class = task if isinstance(task, type) else load_task(spec)
    check_constructor(task_class)

    layers = Layers(overrides or Layer({}), _recorded(facts, task_class), Layer({}))
    config = resolve_task(spec, task_class, layers)
    return SavedRun(checkpoint, progress, spec, task_class, config)


def find_checkpoint(run: Path, which: str | int, *, prints: bool = True) -> Path:
    """The checkpoint `best`, `last` or of a step, every byte checked. `best` is by the metric that
    the task named at the save: no code is imported. `prints`: whether this process reports that
    ones newer than `last` were skipped."""
    root = RunFolder(run).checkpoints
    if which in ("best", "last"):
        newest, reasons = _newest(run)
        if which == "last":
            if reasons and prints:
                print_message(f"{'; '.join(reasons)}; {newest.name} is used as the last checkpoint")
            return newest

        which = _best_step(RunFolder(run), newest, reasons)
    elif not str(which).isdecimal():
        raise UsageError(
            f"there is no checkpoint {which!r}", next_step="name it best, last, or by its step"
        )

    path = root / catalog.folder_name(int(which))
    if not path.is_dir():
        steps = ", ".join(map(str, catalog.list_steps(root)))
        raise UsageError(
            f"{run} has no checkpoint of step {which}",
            next_step=f"choose one of its steps: {steps}",
        )

    catalog.verify(path)
    check_contents(path)
    return path


def _newest(run: Path) -> tuple[Path, list[str]]:
    """The newest complete checkpoint, and why newer ones were skipped."""
    newest, skipped = catalog.newest_valid(RunFolder(run).checkpoints, check_contents)
    reasons = [f"{entry.path.name} was skipped: {entry.reason}" for entry in skipped]
    if newest is None:
        raise CheckpointError(
            as_list(f"there is no complete checkpoint in {run}", reasons),
            next_step="rerun its command until it saves, or give another run",
        )

    return newest, reasons


@contextmanager
def fetched_run(url: str, which: str | int) -> Iterator[Path]:
    """A temporary folder with the checkpoint `best`, `last` or of a step of a run in an object
    store, for `find_checkpoint`."""
    with opened_run(url) as (run, folder):
        checkpoints = run.checkpoints()
        root = folder / CHECKPOINTS
        complete = checkpoints.complete

        if which in ("best", "last"):
            newest, _ = run.restore_newest(checkpoints, root)
            progress = catalog.read_document(root / catalog.folder_name(newest), "progress")

            # Which one is the best follows from what the newest has recorded.
            facts = progress.get("facts", {})
            metric = str(facts.get("best_metric"))
            order = ranked(complete, metric, bool(facts.get("higher_is_better")))
            if which == "best" and order and order[0] != newest:
                run.fetch_checkpoint(order[0], complete[order[0]], root)
        elif str(which).isdecimal() and int(which) in complete:
            run.fetch_checkpoint(int(which), complete[int(which)], root)
        else:
            steps = ", ".join(map(str, complete)) or "none"
            raise UsageError(
                f"{url} has no checkpoint {which}",
                next_step=f"choose last, or one of its steps: {steps}",
            )

        yield folder


def _best_step(run: RunFolder, newest: Path, reasons: Sequence[str]) -> int:
    """The step of the best checkpoint. `reasons`: why newer checkpoints were skipped, for the error
    if there is no best one."""
    root = run.checkpoints
    progress = catalog.read_document(newest, "progress")
    facts = progress["facts"]

    metric = facts.get("best_metric")
    if metric is None:
        step = _best_step_of_old_run(run, progress["step"])
        problem = f"the checkpoints in {root} are of version 0.1, which recorded the best only at the end of a run"
    else:
        step = best(root, metric=str(metric), higher_is_better=bool(facts.get("higher_is_better")))
        problem = f"no checkpoint in {root} was evaluated for {metric!r}, so none is the best"

    if type(step) is not int:
        raise UsageError(
            as_list(problem, reasons) if reasons else problem,
            next_step='choose the last (--which last, which="last"), or one by its step',
        )

    return step


def _best_step_of_old_run(run: RunFolder, last_step: int) -> object:
    """What version 0.1 recorded at the end of a run, in its last event; None: the run had not
    ended."""
    if not run.event_file(0).is_file():
        return None

    best_step = None
    for event in read_events(run.event_file(0)):
        if event.get("kind") == "end" and event.get("step") == last_step:
            best_step = event.get("best_step")

    return best_step


def _recorded(facts: dict[str, Any], task: type[Task]) -> Layer:
    """The settings of the checkpoint; without those that there are no more, in this version or in
    the task."""
    fields_of_task = task_fields(task, Task)

    settings = []
    for path, value in facts["config"].items():
        exists = path in fields_of_task if is_in_task(path) else annotation_of(path) is not None
        if exists:
            settings.append(Setting(path, value, where="the checkpoint"))

    return check_layer(settings)


def load_model(saved: SavedRun, *, averaged: bool) -> nn.Module:
    """The task's model with the weights of the checkpoint, or with the average of them that an EMA
    hook kept; on the CPU, in evaluation mode. It draws no random number that the caller would
    miss."""
    with keeping_rng(torch.device("cpu")):
        model = saved.task(saved.config).model()

    snapshot = store.read(saved.checkpoint)
    state.load_model_state(model, weights_in(snapshot, averaged=averaged), {})

    if average_in(snapshot) is not None and not averaged:
        print_message(
            f"loaded step {saved.step} of {saved.checkpoint.parents[1]}: the weights as trained; ema=True loads their "
            "average (EMA), which evaluate and predict use"
        )

    return model.eval()


def evaluation_data(task: Task, data: str | None) -> dict[str, Any]:
    """The evaluation sets by name. `data`: None for the task's own; `file.py:Class` for that
    dataset, made with the settings of the run; otherwise a file or folder, which the task reads as
    it reads `data.dir`."""
    config = task.config
    if data is None:
        return evaluation_sets(task)
    if is_class_spec(data) and not Path(data).exists():
        return {"": dataset_for(config, data, "eval")}

    if not Path(data).exists():
        raise UsageError(
            f"there is no file or folder {data} (looked in {Path.cwd()})",
            next_step="name the data, or a dataset of your own as path/to/file.py:Class",
        )

    moved = replace(config, data=replace(config.data, dir=data))
    return evaluation_sets(type(task)(moved))


def evaluate_run(saved: SavedRun, ddp: RunManager, data: str | None = None) -> dict[str, Any]:
    """Collective: evaluate the checkpoint as the run itself does it. `data`: as for
    `evaluation_data`.

        {"step": 1841, "checkpoint": "...", "world_size": 2, "samples": 10000, "seconds": 1.2,
         "metrics": {"loss": 0.31, "accuracy": 0.91}}
    """
    task = saved.task(with_local_data(saved.config, ddp))
    sets = evaluation_data(task, data)
    if not sets:
        raise UsageError(
            f"{saved.task.__name__} has no evaluation data",
            next_step="return a dataset from its eval_data(), or name one: --data path/to/file.py:Class",
        )

    job = build_evaluation_job(saved.config, task, ddp, sets)
    try:
        restore_for_evaluation(job, saved)
        started = time.perf_counter()
        metrics = evaluate(job)

        return {
            "step": saved.step,
            "checkpoint": str(saved.checkpoint),
            "world_size": ddp.world_size,
            "samples": job.eval_samples,
            "seconds": time.perf_counter() - started,
            "metrics": metrics,
        }
    finally:
        job.close()


def restore_for_evaluation(job: EvaluationJob, saved: SavedRun) -> None:
    """Collective: the weights of the checkpoint, and what hooks make of them for an evaluation
    (EMA). Rank 0 reads, the others receive. No optimizer, and no other state."""
    snapshot = None
    if job.ddp.is_main_process():
        snapshot = store.read(saved.checkpoint, only=("model", HOOKS_FILE))

    snapshot = store.broadcast(snapshot)
    state.restore_model(snapshot, job.model)

    run = saved.checkpoint.parents[1]
    hooks = make_hooks(job, saved.config, run, None, saved.step, saved.progress)
    hooks.restore(snapshot)

    for hook in hooks.defining("before_evaluation"):
        for moment in ("start", "before_evaluation"):
            hooks.call(moment, hook)


Encoder = Callable[[Any, int], bytes]
"""From what `predict` returned for a batch of so many samples to bytes."""


def predict_run(
    saved: SavedRun,
    ddp: RunManager,
    data: str | None,
    *,
    encode: Encoder,
) -> Iterator[bytes]:
    """Collective: the encoded predictions of every batch, in order, on rank 0; the others get none.
    With the weights that the run evaluates with (of EMA, for example). `data`: as for
    `evaluation_data`.

    A rank predicts every world_size-th batch, and rank 0 yields a round of all ranks as soon as it
    is there."""
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

            batch = next(batches, None)
            if batch is not None:
                with job.autocast:
                    outputs = job.task.predict(job.model, job.task.on_device(batch.data))

                content = bytearray(encode(outputs, batch.size))
                encoded = torch.frombuffer(content, dtype=torch.uint8)

            sizes = gather_json(len(encoded))
            if not any(sizes):
                break

            for part in gather_on_main(encoded, sizes):
                if len(part):
                    yield part.numpy().tobytes()

    check_same(  # only a stream's: of anything else the samples were compared before
        {"the samples that they read": [loader.num_samples, loader.digest]},
        host=job.ddp.host,
        next_step="let every rank read the whole stream in one order: Drumline splits it by batches",
    )


# What is written: a line of JSON for each sample, or one array


def as_lines_of_json(outputs: Any, size: int) -> bytes:
    """One line of JSON for each sample: `{"label": 7, "score": 0.93}`, `[0.1, 0.9]` or `7`."""
    return b"".join(json.dumps(as_json(row)).encode() + b"\n" for row in rows_of(outputs, size))


def rows_of(outputs: Any, size: int) -> list[Any]:
    """One entry for each of `size` samples. A tensor or an array has the samples in its first
    dimension, a list has an entry for each, and a mapping or a tuple consists of such parts: of
    `{"label": [7, 2], "score": [0.9, 0.4]}` and 2 samples `[{"label": 7, "score": 0.9}, {"label":
    2, "score": 0.4}]`."""
    if isinstance(outputs, Mapping) and outputs:
        names = list(map(str, outputs))
        rows = rows_of(tuple(outputs.values()), size)
        return [dict(zip(names, row, strict=True)) for row in rows]

    if isinstance(outputs, tuple) and outputs:
        columns = [rows_of(part, size) for part in outputs]
        return [list(row) for row in zip(*columns, strict=True)]

    if isinstance(outputs, Tensor | np.ndarray):
        _check_samples(outputs, size)
        return list(outputs.tolist())

    if isinstance(outputs, list) and len(outputs) == size:
        arrays = (Tensor, np.ndarray, np.generic)
        plain: list[Any] = pytree.tree_map_only(arrays, lambda leaf: leaf.tolist(), list(outputs))
        return plain

    raise _unusable(f"a {type(outputs).__name__}", size)


def _check_samples(outputs: Tensor | NDArray[Any], size: int) -> None:
    """Refuse a tensor or an array whose first dimension is not that of the samples."""
    if outputs.ndim == 0 or len(outputs) != size:
        raise _unusable(f"a {type(outputs).__name__} of shape {list(outputs.shape)}", size)


def _unusable(what: str, size: int) -> UsageError:
    """The error about outputs that are not one for each sample."""
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
        if outputs.dtype is torch.bfloat16:  # numpy has no such type
            outputs = outputs.float()

        outputs = outputs.cpu().numpy()

    file = io.BytesIO()
    np.save(file, outputs, allow_pickle=False)
    return file.getvalue()


def write_array(file: BinaryIO, parts: Iterator[bytes]) -> int:
    """Put the arrays of all batches together, in a file of numpy's format; the number of samples,
    which is written at the end, is returned. The header, written first, has room for it."""
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
