"""Which kind of step a run takes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import UsageError
from drumline.config.schema import Config
from drumline.data.loader import Step
from drumline.runs.events import read_events
from drumline.training.job.job import build_job, make_manager
from drumline.training.steps import choice
from drumline.training.steps.choice import StepOptions, make_step
from tests.jobs import Classify, make_config, newest, train_here
from tests.ranks import RanksFailed, run_ranks


def kinds(*settings: tuple[str, str | None]) -> list[str]:
    """Of the steps for each `train.step` and the earlier choice of `auto`."""
    config = make_config()
    results = []
    with make_manager(config) as ddp:
        job = build_job(config, Classify(config), ddp)
        for step, chosen in settings:
            try:
                results.append(
                    type(
                        make_step(
                            replace(job, step_kind=step),
                            make_config(step=step),
                            StepOptions(chosen=chosen),
                        )
                    ).__name__
                )
            except UsageError as error:
                results.append(str(error))
    return results


def test_auto_keeps_its_choice_on_this_kind_of_device() -> None:
    settings = [
        ("auto", None),
        ("auto", "eager"),
        ("auto", "compiled_graph"),  # on a GPU
        ("eager", "compile"),
        ("graph", None),
    ]
    [found] = run_ranks(1, kinds, *settings)
    assert found == [
        "AutoStep",
        "TrainStep",
        "AutoStep",
        "TrainStep",
        "--train.step graph needs a GPU, and this rank computes on cpu\n  try: choose one of eager, compile",
    ]


class TooLarge:
    """A compiled step for which rank 1 has too little memory."""

    def __init__(self, job: Any, **settings: Any) -> None:
        self._eager = choice.TrainStep(job, clip_norm=settings["clip_norm"])

    def __call__(self, step: Step) -> None:
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self._eager(step)


def train_with_too_little_memory(config: Config, run: Path) -> None:
    choice.compiled_step = TooLarge  # type: ignore[assignment,misc]
    choice.WARM_UP_STEPS = choice.TIMED_STEPS = 1
    choice.SHORTEST_COMPILED_S = 0.0
    train_here(config, Classify, run)


def test_a_kind_that_runs_out_of_memory_on_one_rank_is_left_out_on_all_at_the_next_start(
    tmp_path: Path,
) -> None:
    config = make_config(step="auto", steps=5)
    record = tmp_path / "step-trial.txt"
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_with_too_little_memory, config, tmp_path)
    assert (
        "TrialError: out of memory while --train.step auto tried compile: CUDA out of"
        in caught.value.errors[1]
    )
    assert record.read_text() == "compile"
    run_ranks(2, train_with_too_little_memory, config, tmp_path)
    events = read_events(tmp_path / "events" / "rank-00000.jsonl")
    assert [event["message"] for event in events if event["kind"] == "note"] == [
        "compile steps are not tried: the run failed at an earlier start while it tried them "
        "(remove step-trial.txt from the run folder to try them again)",
        "steps run as eager, the fastest here; time per step relative to it: eager 1.00",
    ]
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == "eager"
    assert record.read_text().split() == ["compile"], (
        "a third start before the first checkpoint needs it, too"
    )
