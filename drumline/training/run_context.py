"""The context of a run, for everything around its steps: the user's request, and how it differs
from the settings of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError
from drumline.checkpoint.retention import Retention
from drumline.config.fields import scope_of
from drumline.config.schema import Config
from drumline.rank.determinism import platform_facts
from drumline.runs.events import Reporter
from drumline.runs.run_folder import RunFolder
from drumline.training.between_steps.task_hooks import TaskHooks
from drumline.training.between_steps.throughput import Throughput
from drumline.training.job.job import Job, Progress, flat, run_length
from drumline.training.tasks.hook import Hook


@dataclass(frozen=True)
class RunRequest:
    """A task, its settings and folder, and the arguments of the command."""

    task: str
    config: Config
    run: Path
    fresh: bool
    command: tuple[str, ...]


def facts_of(
    request: RunRequest, job: Job, *, before: Mapping[str, Any] | None = None, step: int = 0
) -> dict[str, Any]:
    """What a checkpoint records about the run. `before`: the same from the checkpoint at `step`
    that it resumed."""
    history: list[Any] = []
    began_with: dict[str, Any] = {}
    if before is not None:
        began_with = {"model.init": before["config"].get("model.init")}
        if request.config.train.step is None:
            began_with["train.step"] = before["config"].get("train.step", "eager")
        changed = {
            name: {"from": a, "to": b} for name, (a, b) in changed_settings(before, request).items()
        }
        reset = {"optimizer": "reset"} if resets_optimizer(before, request) else {}
        history = [*before.get("history", [])]
        if changed or reset:
            history.append({"step": step, "changed": changed, **reset})
    return {
        "task": request.task,
        "config": {**flat(request.config), **began_with},
        "world_size": job.ddp.world_size,
        "batch_size": job.batch.size,
        "data": job.data_fingerprint,
        "best_metric": job.task.best_metric,
        "higher_is_better": job.task.higher_is_better,
        "machine": platform_facts(job.ddp.device),
        # The choice of `--train.step auto`: if measured again, it might differ.
        "step": (before or {}).get("step"),
        "history": history,
    }


def changed_settings(before: Mapping[str, Any], request: RunRequest) -> dict[str, tuple[Any, Any]]:
    """The settings, with old and new values, that changed since the checkpoint and may change the
    result."""
    old = before["config"]
    new = flat(request.config)
    auto_by_default = old.get("train.step") is None and before.get("step") is not None
    if new["train.step"] is None or (auto_by_default and new["train.step"] == "auto"):
        # As the run began.
        del new["train.step"]
    elif old.get("train.step") is None:
        old = {**old, "train.step": before.get("step") or "eager"}
    changed = {
        name: (old[name], new[name])
        for name in new
        if name in old and old[name] != new[name] and scope_of(name).changes_result
    }
    # The path of the task's file may have changed.
    tasks = (before["task"].rpartition("/")[2], request.task.rpartition("/")[2])
    return changed if tasks[0] == tasks[1] else {"task": tasks, **changed}


def resets_optimizer(before: Mapping[str, Any], request: RunRequest) -> bool:
    """Whether --optim.reset applies now: not if the checkpoint was already trained with it."""
    old = before["config"]
    optim = request.config.optim
    return optim.reset and not (old.get("optim.reset", False) and old["optim.name"] == optim.name)


def check_not_finished(
    before: Mapping[str, Any], request: RunRequest, *, step: int, total_steps: int
) -> None:
    """Refuse other settings for a finished run: its result is not theirs."""
    changed = {
        name: values
        for name, values in changed_settings(before, request).items()
        if scope_of(name).changes_finished_run
    }
    if step < total_steps or not changed:
        return
    texts = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
    reached = f"has finished at step {step}"
    if not changed.keys().isdisjoint({"train.epochs", "train.steps"}):
        reached = f"is at step {step}, at or after the end that train.epochs or train.steps now set"
    raise UsageError(
        f"the run in {request.run} {reached}, and was trained with other settings: {texts}",
        next_step="start a new run with --fresh (the earlier run is moved aside) or --run DIR; to train further, raise "
        "train.epochs or train.steps",
    )


def check_init(before: Mapping[str, Any], request: RunRequest, *, step: int) -> None:
    """Refuse other initial weights for a run that resumes: they would have no effect."""
    init = request.config.model.init
    began_with = before["config"].get("model.init")
    if init not in (None, began_with):
        raise UsageError(
            f"the run in {request.run} began with {began_with or 'random weights'} and resumes from step {step}: "
            f"--model.init {init} would have no effect",
            next_step="leave it out to resume, or start a new run with --fresh (this one is moved aside) or --run DIR",
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any], request: RunRequest) -> list[str]:
    """A message for everything that changed since the checkpoint and may change bits."""
    texts = [
        f"{name} changed since the checkpoint: {old} -> {new}"
        for name, (old, new) in changed_settings(before, request).items()
    ]
    if before["data"] != now["data"]:
        texts.append("the training data changed since the checkpoint")
    if before["world_size"] != now["world_size"] and request.config.train.exact != "elastic":
        texts.append(
            f"the number of ranks changed since the checkpoint: {before['world_size']} -> {now['world_size']}; the "
            "samples are the same, but not the bits (--train.exact elastic keeps both)"
        )
        return texts
    machine = before.get("machine", now["machine"])
    texts += [
        f"the {name} changed since the checkpoint: {machine.get(name)} -> {value}; bits may differ from here on"
        for name, value in now["machine"].items()
        if machine.get(name) != value
    ]
    return texts


@dataclass(frozen=True)
class RunContext:
    """One object for the whole run; only `progress` and `throughput` change."""

    request: RunRequest
    job: Job
    progress: Progress
    reporter: Reporter
    total_steps: int
    hooks: TaskHooks | None = None
    """None: the task has none."""
    throughput: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.progress.last_step = self.total_steps

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.request.run)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the latest evaluation."""
        return self.progress.metrics

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        cursor = self.progress.cursor
        return max(1, cursor.epoch if cursor.position == 0 else cursor.epoch + 1)

    def call_hooks(self, moment: str, only: Hook | None = None) -> None:
        """Call this method of the task's hooks, or of one of them."""
        if self.hooks is not None:
            self.hooks.call(
                moment, step=self.progress.step, epoch=self.epoch, metrics=self.metrics, only=only
            )

    def end_if(self, num_votes: float) -> None:
        """Collective: end the run after this step if `num_votes`, the number of ranks that ask for
        it, is not 0."""
        if self.hooks is None or not num_votes:
            return
        progress = self.progress
        if progress.step < progress.last_step:
            progress.stopped = {
                "reason": self.hooks.pending_reason(),
                **run_length(self.config.train),
            }
            progress.last_step = progress.step
        self.hooks.run.stop_reason = None

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        task = self.job.task
        settings = self.config.checkpoint
        return Retention(
            settings.keep_last, settings.keep_best, task.best_metric, task.higher_is_better
        )

    def note(self, message: str) -> None:
        """Log a note."""
        self.reporter.report("note", step=self.progress.step, message=message)

    def warn(self, message: str) -> None:
        self.reporter.report("warning", step=self.progress.step, message=message)
