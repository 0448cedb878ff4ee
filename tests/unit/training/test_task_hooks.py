"""The hooks of a task: which are accepted, what a checkpoint keeps of them, and whose error it
was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.base.errors import CheckpointError, UsageError
from drumline.checkpoint.store import Snapshot
from drumline.config.schema import Config
from drumline.training.job.job import Progress
from drumline.training.run_context import TaskHooks, make_hooks
from drumline.training.tasks.base import Task
from drumline.training.tasks.hook import Hook, Run
from drumline.training.tasks.ready_hooks import EMA
from drumline.watch.heartbeat import HeartbeatWriter


def hooks_of(hooks: Sequence[Any], task: type[Task] = Task) -> TaskHooks:
    ddp = SimpleNamespace(host="a", device=torch.device("cpu"), rank=0, world_size=1)
    task_class = type(task.__name__, (task,), {"hooks": lambda self: hooks})
    parts = {
        "ddp": ddp,
        "model": nn.Linear(1, 1),
        "optimizer": None,
        "heartbeat": HeartbeatWriter(),
        "eval_loaders": {},
        "autocast": nullcontext(),
    }
    job: Any = SimpleNamespace(task=task_class(Config()), **parts)
    return make_hooks(job, Config(), Path("run"), lambda *_, **__: None, 10, Progress())


def some(*hooks: Hook) -> TaskHooks:
    return hooks_of(hooks)


class Counts(Hook):
    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.weight = torch.full((2,), float(count))

    def after_step(self, run: Run) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "of": {"weight": [self.weight]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, (self.weight,) = state["count"], state["of"]["weight"]


class Forgets(Hook):
    pass


class Raises(Hook):
    def after_step(self, run: Run) -> None:
        raise KeyError("epoch")

    def start(self, run: Run) -> None:
        raise UsageError("there is no batch", next_step="give one")

    def state_dict(self) -> dict[str, Any]:
        return {"model": nn.Linear(1, 1)}


def test_a_task_without_hooks_has_none() -> None:
    none = hooks_of([])
    assert none.capture() == Snapshot({}, {})
    assert none.pending_reason() is None


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Counts, "returned Counts, which is not a drumline.Hook object"),
        (print, "returned print, which is not a drumline.Hook object"),
    ],
)
def test_what_is_no_hook_is_refused(value: Any, what: str) -> None:
    with pytest.raises(
        UsageError, match=rf"Task.hooks\(\) {what} with every_steps from 1 on\n  try: return a list"
    ):
        hooks_of([value])


@pytest.mark.parametrize("every", [0, 2.0, None])
def test_an_interval_is_a_number_of_steps(every: Any) -> None:
    hook = Counts()
    hook.every_steps = every
    with pytest.raises(
        UsageError, match=r"Counts, which is not a drumline\.Hook object with every_steps"
    ):
        hooks_of([hook])


def test_states_go_to_hooks_of_the_same_class_in_order(caplog: pytest.LogCaptureFixture) -> None:
    saved = some(Counts(1), Forgets(), Counts(2)).capture()
    assert [entry["name"] for entry in saved.documents["hooks"]] == ["Counts", "Forgets", "Counts"]
    assert list(saved.tensors["hooks"]) == ["0/of/weight/0", "2/of/weight/0"]
    new = some(Forgets(), Counts(), Counts())
    new.restore(saved)
    _, first, second = new.hooks
    assert isinstance(first, Counts)
    assert isinstance(second, Counts)
    assert (first.count, second.count) == (1, 2)
    assert torch.equal(second.weight, torch.full((2,), 2.0))
    assert second.weight is not saved.tensors["hooks"]["2/of/weight/0"], (
        "a copy: it may be mapped from the file"
    )
    assert not caplog.records


def test_hooks_that_came_since_the_checkpoint_are_named(caplog: pytest.LogCaptureFixture) -> None:
    saved = some(Counts(1), Counts(2)).capture()
    some(Counts()).restore(saved)
    some(Forgets(), Counts()).restore(Snapshot({}, {}))
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no state of the hook Counts, which begins anew"
    ]


@pytest.mark.parametrize(
    "document", [[{"name": "Counts"}], [7], 7, [{"name": "Counts", "state": {"tensor": "x"}}]]
)
def test_a_damaged_document_is_an_error_of_the_checkpoint(document: Any) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint's hooks is not what Drumline saves"):
        some(Counts()).restore(Snapshot({}, {"hooks": document}))


def test_an_error_names_the_hook() -> None:
    hooks = some(Counts(), Raises())
    with pytest.raises(KeyError) as caught:
        hooks.call("after_step")
    assert caught.value.__notes__ == ["in the hook Raises.after_step()"]
    with pytest.raises(
        UsageError, match=r"the hook Raises.start\(\): there is no batch\n  try: give one"
    ):
        hooks.call("start")
    with pytest.raises(
        CheckpointError,
        match=r"the hook Raises.state_dict\(\): 1/model cannot be saved: it is a Linea",
    ):
        hooks.capture()


def test_hooks_that_change_the_model_for_an_evaluation_nest() -> None:
    hooks = some(EMA(0.5), EMA(0.9))
    hooks.call("start")
    weight: Any = hooks.run.model.weight
    with torch.no_grad():
        weight.add_(1.0)
    trained = weight.clone()
    for moment in ("after_step", "before_evaluation"):
        hooks.call(moment)
    assert not torch.equal(weight, trained)
    hooks.call("after_evaluation")
    assert torch.equal(weight, trained)


def test_the_task_logs_in_hooks_only() -> None:
    class Logs(Hook):
        def after_step(self, run: Run) -> None:
            run.task.log("size", 3)

    hooks = some(Logs())
    events = []
    hooks.run._report = lambda kind, **fields: events.append((kind, fields))
    hooks.progress.step = 3
    hooks.call("after_step")
    assert events == [("logged", {"step": 3, "name": "size", "type": "scalar", "value": 3})]
    with pytest.raises(
        UsageError,
        match=r"Task.log\(\) was called outside a hook\n  try: in loss\(\) and on_device\(\)",
    ):
        hooks.run.task.log("size", 3)


def test_the_first_reason_to_stop_counts() -> None:
    hooks = some(Counts())
    assert hooks.vote() == 0.0
    assert hooks.pending_reason() is None
    hooks.run.stop("enough")
    hooks.run.stop("more than enough")
    assert hooks.vote() == 1.0
    assert hooks.pending_reason() == "enough"


def test_the_request_of_a_hook_that_was_removed_ends_nothing() -> None:
    hooks = some(Counts())
    hooks.run.stop_reason = "enough"
    assert (hooks.vote(), hooks.pending_reason()) == (1.0, "enough")

    without_hooks = some()
    without_hooks.run.stop_reason = "enough"
    assert (without_hooks.vote(), without_hooks.pending_reason()) == (0.0, None)
