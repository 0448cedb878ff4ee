"""The order of what happens between steps, and when each action is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.config.schema import CheckpointConfig, Config, LogConfig, TrainConfig, WatchConfig
from drumline.data.sharding import Cursor, Ledger
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress
from drumline.training.loop import CompareReplicas, Loop, between_steps
from drumline.training.run_context import (
    AT_EPOCH_END,
    Action,
    RunContext,
    RunRequest,
    SimpleAction,
    TaskHooks,
)
from drumline.training.tasks.hook import Hook, Run
from drumline.watch.heartbeat import HeartbeatWriter

ORDER = [
    "first_step",
    "log",
    "compare_replicas",
    "evaluate",
    "compare_replicas_again",
    "save",
    "report_save",
    "preempt",
]
CONFIG = Config(
    log=LogConfig(every_steps=4),
    watch=WatchConfig(replicas_every=6),
    train=TrainConfig(eval_every_epochs=2),
    checkpoint=CheckpointConfig(every_steps=0, every_epochs=1),
)


def make_context(config: Config, total_steps: int, hooks: Sequence[Hook] = ()) -> RunContext:
    ddp = SimpleNamespace(
        is_main_process=lambda: True, rank=0, world_size=2, host="a", device=torch.device("cpu")
    )
    model = torch.nn.Linear(1, 1)
    job: Any = SimpleNamespace(
        ddp=ddp,
        model=model,
        optimizer=None,
        rates=None,
        sync=None,
        sharded=None,
        eval_loaders={},
        heartbeat=HeartbeatWriter(),
    )
    reporter: Any = SimpleNamespace()
    request = RunRequest("test", config, Path("run"), False, ())
    run: Any = SimpleNamespace()
    progress = Progress()
    return RunContext(
        request, job, progress, reporter, total_steps, TaskHooks(hooks, run, job, progress)
    )


def make_actions(context: RunContext) -> list[Action]:
    anything: Any = SimpleNamespace(is_asked=False)
    saver = Saver(context, facts={}, check_state=lambda: None)
    first_step = SimpleAction(
        "first_step",
        due=lambda step: context.throughput.start_s is None,
        run=anything,
        interval=AT_EPOCH_END,
    )
    return [first_step, *between_steps(context, anything, saver, anything, notices=anything)]


def run_names(
    monkeypatch: pytest.MonkeyPatch, config: Config, *, steps: int, per_epoch: int
) -> list[list[str]]:
    """The names of the actions that run after each step."""
    context = make_context(config, steps)
    actions = make_actions(context)
    names: list[str] = []
    for action in actions:
        monkeypatch.setattr(action, "run", lambda _, action=action: names.append(action.name))
    # It runs once.
    throughput = context.throughput
    monkeypatch.setattr(
        actions[0],
        "run",
        lambda _: (names.append("first_step"), setattr(throughput, "start_s", 1.0)),
    )
    loop = Loop(context, SimpleNamespace(), Ledger(), actions)  # type: ignore[arg-type]
    names_by_step = []
    for step in range(1, steps + 1):
        context.progress.step, context.progress.cursor = (
            step,
            Cursor(step // per_epoch, step % per_epoch),
        )
        loop.run_actions()
        names_by_step.append(names[:])
        names.clear()
    return names_by_step


def test_the_order_is_fixed() -> None:
    actions = make_actions(make_context(CONFIG, 10))
    assert [action.name for action in actions] == ORDER


class EveryThird(Hook):
    every_steps = 3

    def after_step(self, run: Run) -> None: ...


class EveryStep(Hook):
    def after_step(self, run: Run) -> None: ...


class AtTheEnd(Hook):
    def end(self, run: Run) -> None: ...


def test_hooks_that_define_after_step_come_first_in_their_order() -> None:
    context = make_context(CONFIG, 10, [EveryThird(), AtTheEnd(), EveryStep()])
    first, *after_step = make_actions(context)[:3]
    assert first.name == "first_step"
    assert [action.name for action in after_step] == [
        "EveryThird.after_step",
        "EveryStep.after_step",
    ]
    assert [action.name for action in make_actions(context)[3:]] == ORDER[1:]
    for hook in context.hooks.hooks:
        hook.every_steps = 2  # too late: the loop knows when to ask
    assert [[step for step in range(1, 8) if action.due(step)] for action in after_step] == [
        [3, 6],
        [*range(1, 8)],
    ]


def test_a_run_that_is_stopped_ends_as_at_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(CONFIG, 100)
    actions = make_actions(context)
    names: list[str] = []

    def run(action: Action) -> None:
        names.append(action.name)
        if action.name == "log":
            context.progress.last_step = context.progress.step

    for action in actions:
        monkeypatch.setattr(action, "run", lambda _, action=action: run(action))
    loop = Loop(context, SimpleNamespace(), Ledger(), actions[1:])  # type: ignore[arg-type]
    context.progress.step, context.progress.cursor = 4, Cursor(0, 4)
    loop.run_actions()
    assert names == ["log", "compare_replicas", "evaluate", "compare_replicas_again", "save"]


def test_each_action_runs_when_it_is_due_and_all_of_them_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names_by_step = run_names(monkeypatch, CONFIG, steps=17, per_epoch=5)
    due = {step: names for step, names in enumerate(names_by_step, 1) if names}
    assert due == {
        1: ["first_step"],
        4: ["log"],
        5: ["compare_replicas", "save"],
        6: ["compare_replicas"],
        8: ["log"],
        10: ["compare_replicas", "evaluate", "compare_replicas_again", "save"],
        12: ["log", "compare_replicas"],
        15: ["compare_replicas", "save"],
        16: ["log"],
        17: ["log", "compare_replicas", "evaluate", "compare_replicas_again", "save"],
    }


def test_replicas_are_compared_before_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (1, 3):
        config = replace(CONFIG, checkpoint=CheckpointConfig(every_steps=every, every_epochs=0))
        for names in run_names(monkeypatch, config, steps=12, per_epoch=5):
            if "save" in names:
                assert "compare_replicas" in names[: names.index("save")]


def test_without_intervals_all_happens_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        log=LogConfig(every_steps=100),
        watch=WatchConfig(replicas_every=0),
        train=TrainConfig(eval_every_epochs=0),
        checkpoint=CheckpointConfig(every_steps=0, every_epochs=0),
    )
    *before, last = run_names(monkeypatch, config, steps=11, per_epoch=5)
    assert before == [["first_step"], *[[]] * 9]
    assert last == ["log", "compare_replicas", "evaluate", "compare_replicas_again", "save"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_process_has_nothing_to_compare(world_size: int) -> None:
    context = make_context(CONFIG, 12)
    context.job.ddp.world_size = world_size
    compared: list[int] = []
    anything: Any = SimpleNamespace(check=lambda: None)
    compare = CompareReplicas(context, anything, anything)
    compare._replicas = SimpleNamespace(check=compared.append)
    compare.run(context)
    assert compared == ([] if world_size == 1 else [0])


class Counts(Action):
    name = "counts"

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.asked: list[int] = []

    def due(self, step: int) -> bool:
        self.asked.append(step)
        return False


@pytest.mark.parametrize(
    ("intervals", "asked_at"),
    [
        ((3, AT_EPOCH_END), [[1, 3, 5, 6, 8], [1, 3, 5, 6, 8]]),
        ((0, 4), [[1, 2, 3, 4, 5, 6, 7, 8], [1, 4, 5, 8]]),
        ((1, AT_EPOCH_END), [[1, 2, 3, 4, 5, 6, 7, 8]] * 2),
    ],
)
def test_actions_are_asked_together_at_their_intervals_and_epoch_ends(
    intervals: tuple[int, int], asked_at: list[list[int]]
) -> None:
    context = make_context(CONFIG, 8)
    actions = [Counts(interval) for interval in intervals]
    loop = Loop(context, SimpleNamespace(), Ledger(), [*actions])  # type: ignore[arg-type]
    for step in range(1, 9):
        context.progress.step, context.progress.cursor = step, Cursor(step // 5, step % 5)
        loop.run_actions()
    assert [action.asked for action in actions] == asked_at
