"""A checkpoint of a run, with its task and the settings it was trained with: for `drumline.load`
and `evaluate`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.base.errors import CheckpointError, UsageError, as_list
from drumline.base.terminal import print_message
from drumline.base.user_code import is_class_spec
from drumline.checkpoint import state, store
from drumline.checkpoint.mirrored_run import CHECKPOINTS, opened_run
from drumline.checkpoint.retention import best, ranked
from drumline.config import Layers
from drumline.config.fields import annotation_of, is_in_task
from drumline.config.flags import Layer, Setting, check_layer
from drumline.config.schema import Config
from drumline.config.task_fields import task_fields
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.training.between_steps.task_hooks import HOOKS_FILE, make_hooks
from drumline.training.job.evaluation_job import (
    EvaluationJob,
    build_evaluation_job,
    evaluate,
    evaluation_sets,
    with_local_data,
)
from drumline.training.manager import RunManager
from drumline.training.resume import check_contents
from drumline.training.saved.exported_weights import average_in, weights_in
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import check_constructor, dataset_for, load_task, resolve_task


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and what it is of."""

    checkpoint: Path
    step: int
    epoch: int
    """Counted from 1."""
    spec: str
    """The task as the user named it."""
    task: type[Task]
    config: Config


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
    progress = catalog.read_document(checkpoint, "progress")
    facts = progress["facts"]
    cursor = progress["cursor"]
    spec = task if isinstance(task, str) else str(facts["task"])
    # Without a task of the user's the code is imported that the checkpoint names.
    task_class = task if isinstance(task, type) else load_task(spec)
    check_constructor(task_class)
    config = resolve_task(
        spec, task_class, Layers(overrides or Layer({}), _recorded(facts, task_class), Layer({}))
    )
    epoch = max(1, cursor["epoch"] + (cursor["position"] > 0))
    return SavedRun(checkpoint, progress["step"], epoch, spec, task_class, config)


def find_checkpoint(run: Path, which: str | int, *, prints: bool = True) -> Path:
    """The checkpoint `best`, `last` or of a step, every byte checked. `best` is by the metric that
    the task named at the save: no code is imported. `prints`: whether this process reports that
    ones newer than `last` were skipped."""
    root = RunFolder(run).checkpoints
    if which not in ("best", "last") and not str(which).isdecimal():
        raise UsageError(
            f"there is no checkpoint {which!r}", next_step="name it best, last, or by its step"
        )
    if which in ("best", "last"):
        newest, skipped = catalog.newest_valid(root, check_contents)
        reasons = [
            f"{checkpoint.path.name} was skipped: {checkpoint.reason}" for checkpoint in skipped
        ]
        if newest is None:
            raise CheckpointError(
                as_list(f"there is no complete checkpoint in {run}", reasons),
                next_step="give the folder of a run of drumline train",
            )
        if which == "last":
            if reasons and prints:
                print_message(f"{'; '.join(reasons)}; {newest.name} is used as the last checkpoint")
            return newest
        which = _best_step(RunFolder(run), newest, reasons)
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
            facts = catalog.read_document(root / catalog.folder_name(newest), "progress").get(
                "facts", {}
            )
            order = ranked(
                complete, str(facts.get("best_metric")), bool(facts.get("higher_is_better"))
            )
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
    """`reasons`: why newer checkpoints were skipped."""
    root = run.checkpoints
    progress = catalog.read_document(newest, "progress")
    facts = progress["facts"]
    if (metric := facts.get("best_metric")) is not None:
        step = best(root, metric=str(metric), higher_is_better=bool(facts.get("higher_is_better")))
        problem = f"no checkpoint in {root} was evaluated for {metric!r}, so none is the best"
    else:  # version 0.1 recorded it only at the end of a run
        events = read_events(run.event_file(0)) if run.event_file(0).is_file() else ()
        ends = [
            event
            for event in events
            if (event.get("kind"), event.get("step")) == ("end", progress["step"])
        ]
        step = ends[-1].get("best_step") if ends else None
        problem = f"the checkpoints in {root} are of version 0.1, which recorded the best only at the end of a run"
    if type(step) is not int:
        problem = as_list(problem, reasons) if reasons else problem
        raise UsageError(
            problem, next_step='choose the last (--which last, which="last"), or one by its step'
        )
    return step


def _recorded(facts: dict[str, Any], task: type[Task]) -> Layer:
    """The settings of the checkpoint; without those that there are no more."""
    fields_of_task = task_fields(task, Task)
    return check_layer(
        Setting(path, value, where="the checkpoint")
        for path, value in facts["config"].items()
        if path in fields_of_task or (annotation_of(path) is not None and not is_in_task(path))
    )


def load_model(saved: SavedRun, *, averaged: bool = False) -> nn.Module:
    """The task's model with the weights of the checkpoint, or with the average of them that an EMA
    hook kept; on the CPU, in evaluation mode. It draws no random number that the caller would
    miss."""
    with state.keeping_rng(torch.device("cpu")):
        model = saved.task(saved.config).model()
    snapshot = store.read(saved.checkpoint)
    state.load_model_state(model, weights_in(snapshot, averaged=averaged), {})
    if average_in(snapshot) is not None:
        which = "the average of the weights (EMA); without ema=True: the weights as trained"
        if not averaged:
            which = "the weights as trained; ema=True loads their average (EMA), which evaluate and predict use"
        print_message(f"loaded step {saved.step} of {saved.checkpoint.parents[1]}: {which}")
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
    return evaluation_sets(type(task)(replace(config, data=replace(config.data, dir=data))))


def evaluate_run(saved: SavedRun, ddp: RunManager, data: str | None = None) -> dict[str, Any]:
    """Collective: evaluate the checkpoint as the run itself does it. `data`: as for
    `evaluation_data`."""
    task = saved.task(with_local_data(saved.config, ddp))
    if not (sets := evaluation_data(task, data)):
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
    (EMA). Rank 0 reads, the others receive."""
    read = (
        store.read(saved.checkpoint, only=("model", HOOKS_FILE))
        if job.ddp.is_main_process()
        else None
    )
    snapshot = store.broadcast(read)
    state.restore_model(snapshot, job.model)
    run = saved.checkpoint.parents[1]
    if (hooks := make_hooks(job, saved.config, run, None, saved.step)) is not None:
        hooks.restore(snapshot)
        for hook in hooks.defining("before_evaluation"):
            for moment in ("start", "before_evaluation"):
                hooks.call(moment, step=saved.step, epoch=saved.epoch, metrics={}, only=hook)
