"""Drumline's own steps: only the engine's step, and a complete run with everything on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import Way
from benchmarks.paused_loop import AfterStep
from benchmarks.stopping import resume, stop
from benchmarks.work import Batch
from drumline.config.schema import Config
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import Cursor, Ledger, plan_epoch
from drumline.rank.determinism import seed_shared
from drumline.runs.events import Reporter
from drumline.training.job.job import Job, Progress, build_job
from drumline.training.loop import Loop
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunContext, RunRequest, make_hooks
from drumline.training.steps.choice import make_step
from drumline.training.tasks.base import Task
from drumline.watch.heartbeat import Phase

ENDLESS = 10**7
QUIET_S = 120.0


def engine_steps(
    ddp: RunManager, config: Config, task: Task, batches: list[Batch] | None = None
) -> Iterator[int]:
    """The training loop as `drumline train` runs it, one step at a time, without a run folder.
    `batches`: to be taken instead of what the loader makes; they are on the device already."""
    seed_shared(config.train.seed)
    job = build_job(config, task, ddp)
    reporter = Reporter([], rank=ddp.rank, host=ddp.host)
    request = RunRequest("", config, Path(), False, ())
    progress = Progress()
    hooks = make_hooks(job, config, Path(), None, ENDLESS, progress)
    context = RunContext(request, job, progress, reporter, ENDLESS, hooks)
    loop = Loop(context, make_step(job, config), Ledger(), [])
    while True:
        for step in job.loader.steps() if batches is None else _steps_of(job, batches):
            loop.take_step(step)
            yield step.plan.global_size


def _steps_of(job: Job, batches: list[Batch]) -> Iterator[Step]:
    """Steps as the loader plans them, on batches that it did not make."""
    for epoch in count():
        for number, plan in enumerate(
            plan_epoch(
                Cursor(epoch), length=job.loader.num_samples or 0, sharding=job.loader.sharding
            )
        ):
            data = batches[number % len(batches)]
            yield Step(plan, iter([MicroBatch(data, len(data[0]), True, 0, True)]))


def whole_run(
    name: str,
    ddp: RunManager,
    config: Config,
    task: type[Task],
    folder: Path,
    *,
    samples: int,
    warm_up: int | None = None,
) -> Way:
    """`drumline train` itself with its run folder: events, ledger, checkpoints, and the watch where
    ddp has it."""
    run = run_folder(folder, name)
    # Its length is in steps; what is due at the end of an epoch only would come in some blocks and
    # not in others.
    config = replace(
        config,
        train=replace(config.train, epochs=None, steps=ENDLESS, eval_every_epochs=0),
        checkpoint=replace(config.checkpoint, every_epochs=0),
        log=replace(config.log, display="none"),
    )

    def go(after_step: AfterStep) -> None:
        seed_shared(config.train.seed)
        progress = _Followed(after_step, samples)
        TrainingRun(RunRequest(name, config, run, False, ()), task, ddp, progress).train()

    return Way(
        name,
        go,
        wake=partial(_with_sidecar, ddp, resume),
        rest=partial(_rest, ddp, run),
        warm_up=warm_up,
    )


def run_folder(folder: Path, name: str) -> Path:
    """Where the whole run of that name is."""
    return folder / re.sub(r"\W+", "-", name)


class _Followed(Progress):
    """The progress of a run, which calls back after each step: the loop moves the cursor once a
    step."""

    def __init__(self, after_step: AfterStep, samples: int) -> None:
        super().__init__()
        self._after_step = after_step
        self._samples = samples

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.cursor if name == "cursor" and hasattr(self, "_samples") else None
        super().__setattr__(name, value)
        if before is not None and value != before:
            self._after_step((value.position or self._samples) - before.position)


def _rest(ddp: RunManager, run: Path) -> None:
    """Wait until no checkpoint is being written. The heartbeat must not show a step that has begun:
    it would be reported as a stall."""
    ddp.connection.heartbeat.mark(Phase.START)
    begun = time.monotonic()
    time.sleep(0.1)  # a save that was just asked for has begun by then
    while any(run.glob("checkpoints/.*.partial")) and time.monotonic() - begun < QUIET_S:
        time.sleep(0.01)
    _with_sidecar(ddp, stop)


def _with_sidecar(ddp: RunManager, act: Callable[[int], None]) -> None:
    """Only our own rows have a sidecar."""
    if (
        ddp.connection.watch_folder is not None
        and (ddp.connection.watch_folder / "sidecar.pid").exists()
    ):
        act(int((ddp.connection.watch_folder / "sidecar.pid").read_text()))


def steps_of(config: Config, kind: Any) -> Config:
    """The same, with that kind of step."""
    return replace(config, train=replace(config.train, step=kind))
