"""Which kind of step a run takes."""

from __future__ import annotations

from dataclasses import replace

from drumline.engine.job import build_job, make_manager
from drumline.engine.steps.choice import make_step
from drumline.errors import UsageError
from tests.jobs import Classify, make_config
from tests.ranks import run_ranks


def kinds(*settings: tuple[str, str | None]) -> list[str]:
    """Of the steps for each `train.step` and what `auto` had come to before."""
    config = make_config()
    found = []
    with make_manager(config) as ddp:
        job = build_job(config, Classify(config), ddp)
        for step, chosen in settings:
            try:
                found.append(type(make_step(replace(job, step=step), make_config(step=step), chosen=chosen)).__name__)
            except UsageError as error:
                found.append(str(error))
    return found


def test_auto_keeps_what_it_came_to_on_this_kind_of_device() -> None:
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
