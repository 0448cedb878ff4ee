"""Ends a rank with -9 at a chosen point of a run: in which step, at what, and on which rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.checkpoint import store
from drumline.config.schema import Config
from drumline.data import delivery, stream_loader
from drumline.parallel.wrap import LiveBuffers
from drumline.training.between_steps import saver
from drumline.training.job import evaluation_job
from drumline.training.loop import Loop
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Task
from tests.jobs import train_here

IN_A_STEP = ("data", "forward", "backward", "exchange", "optimizer", "stepped")
BESIDE = ("write", "rename", "prune")
AT_A_SAVE = ("gather", *BESIDE, "saved")
AT_AN_EPOCH_END = ("evaluation",)
PHASES = (*IN_A_STEP, *AT_A_SAVE, *AT_AN_EPOCH_END)


@dataclass(frozen=True)
class Fault:
    """`after`: how many times that point is passed in the step before the one that is the last."""

    phase: str
    step: int
    rank: int
    after: int = 0


def die_at(fault: Fault, config: Config, task: type[Task], run: Path) -> None:
    """Train, and die there; every rank runs this, and one of them dies."""
    if int(os.environ["RANK"]) == fault.rank:
        _install(fault)
    train_here(config, task, run)


def _install(fault: Fault) -> None:
    state = {"step": 0, "left": fault.after}
    steps_done = (
        fault.step - 1 if fault.phase in IN_A_STEP and fault.phase != "stepped" else fault.step
    )

    def die_if_due() -> None:
        # A checkpoint is written beside the steps that come after it.
        is_due = (
            state["step"] >= steps_done if fault.phase in BESIDE else state["step"] == steps_done
        )
        if not is_due:
            return
        if state["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state["left"] -= 1

    def watch_steps(take_step: Callable[..., None]) -> Callable[..., None]:
        def watched(self: Loop, *args: Any) -> None:
            state["step"] = self.progress.step
            take_step(self, *args)
            state["step"] = self.progress.step
            if fault.phase == "stepped":
                die_if_due()

        return watched

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **options: Any) -> Any:
            die_if_due()
            return function(*args, **options)

        return dying

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            die_if_due()
            return result

        return dying

    Loop.take_step = watch_steps(Loop.take_step)  # type: ignore[method-assign]
    places: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "data": (delivery, "to_device", before),
        "forward": (TrainStep, "_forward", behind),
        "backward": (TrainStep, "_backward", behind),
        "exchange": (
            LiveBuffers,
            "broadcast",
            before,
        ),  # gradients are there, and nothing has been made of them
        "optimizer": (TrainStep, "_update", behind),
        "gather": (saver, "gather_rng", before),
        "write": (store, "write_file", behind),
        "rename": (store, "put_in_place", behind),
        "prune": (saver, "prune", before),
        "saved": (saver.Saver, "save", behind),
        "evaluation": (evaluation_job, "_sum_batches", behind),
    }
    if fault.phase in places:
        where, name, wrapped = places[fault.phase]
        setattr(where, name, wrapped(getattr(where, name)))
    if fault.phase == "data":
        stream_loader.clone = before(stream_loader.clone)
