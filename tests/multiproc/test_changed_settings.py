"""A run that is started again with other settings: what is refused, what resumes, and what the
folder records of it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.base.errors import CheckpointError, ExitCode, UsageError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, LogConfig, OptimConfig, WatchConfig
from drumline.runs.events import read_events
from drumline.training.loop import LogTraining
from tests.jobs import Classify, assert_same_bits, make_config, newest, train_here, train_on
from tests.ranks import RanksFailed

SGD = OptimConfig(lr=0.1, schedule="constant", weight_decay=0.0)
ADAMW = OptimConfig(name="adamw", lr=0.01, schedule="constant", weight_decay=0.0)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with some fields of some sections set."""
    parts = {name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return replace(config, **parts)


def saved_config(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def history(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "settings-history.jsonl").read_text().splitlines()]


def messages(run: Path, kind: str) -> list[str]:
    events = read_events(run / "events" / "rank-00000.jsonl")
    return [event["message"] for event in events if event["kind"] == kind]


class Breaks(Classify):
    """Fails before its first step."""

    def train_data(self) -> Any:
        raise ValueError("no data today")


def test_a_finished_run_refuses_other_settings_and_keeps_its_own(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    train_here(config, Classify, tmp_path)
    before = newest(tmp_path)
    text = (tmp_path / "config.toml").read_text()
    assert not {"mini_resnet", "digits"} & {
        saved_config(tmp_path)[section].get("name") for section in ("model", "data")
    }
    other = changed(config, optim={"lr": 0.5}, train={"seed": 3})
    with pytest.raises(UsageError) as caught:
        train_here(other, Classify, tmp_path, name="other/path/to/test")
    assert str(caught.value) == (
        f"the run in {tmp_path} has finished at step 5, and was trained with other settings: optim.lr 0.1 -> 0.5, "
        "train.seed 0 -> 3\n  try: start a new run with --fresh (the earlier run is moved aside) or --run DIR; to "
        "train further, raise train.epochs or train.steps"
    )
    with pytest.raises(UsageError, match=r"other settings: task test -> other\n"):
        train_here(config, Classify, tmp_path, name="other")
    with pytest.raises(UsageError) as caught:
        train_here(changed(make_config(steps=4), model={"dropout": 0.5}), Classify, tmp_path)
    assert (
        "is at step 5, at or after the end that train.epochs or train.steps now set, and was trained with other "
        "settings: model.dropout 0.0 -> 0.5, train.epochs 1 -> "
    ) in str(caught.value)
    assert (tmp_path / "config.toml").read_text() == text
    assert_same_bits(newest(tmp_path), before)


def test_settings_that_change_no_result_are_no_reason_to_refuse(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    train_here(config, Classify, tmp_path)
    text = (tmp_path / "config.toml").read_text()
    same = replace(
        config,
        log=LogConfig(every_steps=7, display="none"),
        watch=WatchConfig(hang_s=100),
        checkpoint=CheckpointConfig(keep_last=5),
        data=replace(config.data, dir="elsewhere", cache="elsewhere", workers=1),
        optim=replace(config.optim, reset=True),
        train=replace(config.train, on_nan="warn"),
    )
    assert train_here(same, Classify, tmp_path).step == 5
    assert (tmp_path / "config.toml").read_text() == text
    assert not (tmp_path / "settings-history.jsonl").exists()


def test_the_history_of_settings_is_that_of_the_weights(tmp_path: Path) -> None:
    """An entry for each start that changed something and took a step that was saved."""
    first = make_config(epochs=1, optim=SGD)
    train_here(first, Classify, tmp_path)
    second = changed(first, train={"epochs": 2}, optim={"lr": 0.05})
    with pytest.raises(ValueError, match="no data today"):
        train_here(second, Breaks, tmp_path)
    assert saved_config(tmp_path)["optim"]["lr"] == 0.1, "no step was taken with the other rate"
    train_here(second, Classify, tmp_path)
    assert saved_config(tmp_path)["optim"]["lr"] == 0.05
    train_here(second, Classify, tmp_path)
    third = changed(second, train={"epochs": 3, "on_nan": "skip"}, log={"every_steps": 1})
    train_here(third, Classify, tmp_path)
    entries = [
        {
            "step": 5,
            "changed": {
                "optim.lr": {"from": 0.1, "to": 0.05},
                "train.epochs": {"from": 1, "to": 2},
            },
        },
        {
            "step": 10,
            "changed": {
                "train.epochs": {"from": 2, "to": 3},
                "train.on_nan": {"from": "stop", "to": "skip"},
            },
        },
    ]
    assert history(tmp_path) == entries
    assert newest(tmp_path).documents["progress"]["facts"]["history"] == entries
    assert "train.epochs changed since the checkpoint: 1 -> 2" in messages(tmp_path, "warning")


def test_steps_that_were_lost_leave_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_config(epochs=1, optim=SGD, checkpoint=CheckpointConfig(every_epochs=1))
    train_here(first, Classify, tmp_path)
    second = changed(first, train={"epochs": 2})
    with monkeypatch.context() as patch:
        patch.setattr(LogTraining, "run", fail_to_log)
        with pytest.raises(OSError, match="lost"):
            train_here(changed(second, optim={"lr": 0.7}), Classify, tmp_path)
    assert history(tmp_path)[0]["changed"]["optim.lr"] == {"from": 0.1, "to": 0.7}
    train_here(second, Classify, tmp_path)
    assert history(tmp_path) == [{"step": 5, "changed": {"train.epochs": {"from": 1, "to": 2}}}]
    assert saved_config(tmp_path)["optim"]["lr"] == 0.1


def fail_to_log(self: LogTraining, context: object) -> None:
    raise OSError("lost")


def test_the_settings_of_the_optimizer_are_those_of_this_start(tmp_path: Path) -> None:
    """Of the checkpoint it takes the state: what config.toml says is what is trained."""
    config = make_config(epochs=1, optim=replace(SGD, weight_decay=0.1, momentum=0.5))
    train_here(config, Classify, tmp_path)
    train_here(
        changed(config, train={"epochs": 2}, optim={"weight_decay": 0.2, "momentum": 0.6}),
        Classify,
        tmp_path,
    )
    found = dict(newest(tmp_path).documents["optimizer"]["groups"][0]["settings"]["dict"])
    assert (found["weight_decay"], found["momentum"]) == (0.2, 0.6)


READ = store.read


def read_without_class(path: Path) -> store.Snapshot:
    snapshot = READ(path)
    del snapshot.documents["optimizer"]["class"]
    return snapshot


class Wider(Classify):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def test_another_model_is_refused_and_both_ways_out_are_named(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train_here(make_config(epochs=2), Wider, tmp_path)
    way_out = "or start a new run: --fresh moves this one aside, --run DIR trains in another folder"
    assert str(caught.value).endswith(way_out)


class WithoutEvaluation(Classify):
    def eval_data(self) -> Any:
        return None


def test_a_best_metric_without_an_evaluation_is_a_warning_at_the_start(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), WithoutEvaluation, tmp_path)
    assert messages(tmp_path, "warning") == [
        "WithoutEvaluation.best_metric is 'accuracy', so no checkpoint is kept as the best: evaluations report nothing "
        "(there is no eval_data())"
    ]


@pytest.mark.parametrize(("saved", "now"), [(SGD, ADAMW), (ADAMW, SGD)])
def test_another_optimizer_is_refused_by_name_and_may_be_started_again(
    tmp_path: Path, saved: OptimConfig, now: OptimConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"sgd": "SGD", "adamw": "AdamW"}
    train_here(make_config(epochs=1, optim=saved), Classify, tmp_path)
    before = newest(tmp_path)
    config = make_config(
        epochs=2, optim=now, checkpoint=CheckpointConfig(every_steps=1, keep_last=20)
    )
    with pytest.raises(CheckpointError) as caught:
        train_here(config, Classify, tmp_path)
    assert (
        f"the optimizer is {names[saved.name]} in the checkpoint and {names[now.name]} here"
        in str(caught.value)
    )
    assert "or reset the optimizer and keep the weights with --optim.reset" in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE, "no launcher starts it again"
    text = str(caught.value)
    # a checkpoint of an earlier version has no class
    with monkeypatch.context() as patch:
        patch.setattr(store, "read", read_without_class)
        with pytest.raises(CheckpointError) as caught:
            train_here(config, Classify, tmp_path)
    assert str(caught.value) == text
    reset = changed(config, optim={"reset": True})
    train_here(changed(reset, train={"steps": 6, "epochs": None}), Classify, tmp_path)
    after = newest(tmp_path)
    weights = before.tensors["model"]["0.weight"]
    moved = after.tensors["model"]["0.weight"]
    assert (moved - weights).abs().max() < 0.2, "the weights are kept"
    kinds = {name.rpartition("/")[2] for name in after.tensors["optimizer"]}
    assert kinds == ({"step", "exp_avg", "exp_avg_sq"} if now is ADAMW else {"momentum_buffer"})
    entry = history(tmp_path)[0]
    assert (entry["step"], entry["optimizer"]) == (5, "reset")
    assert entry["changed"]["optim.name"] == {"from": saved.name, "to": now.name}
    assert "the optimizer is reset at step 5 (--optim.reset); the weights are kept" in messages(
        tmp_path, "note"
    )


def test_a_reset_happens_once_however_often_the_command_is_repeated(tmp_path: Path) -> None:
    """A launcher restarts ranks with the flags that they had."""
    every_step = CheckpointConfig(every_steps=1, keep_last=20)
    train_here(make_config(steps=3, optim=SGD), Classify, tmp_path / "whole")
    train_here(make_config(steps=3, optim=SGD), Classify, tmp_path / "again")
    reset = make_config(steps=9, optim=replace(ADAMW, reset=True), checkpoint=every_step)
    train_here(reset, Classify, tmp_path / "whole")
    train_here(changed(reset, train={"steps": 5}), Classify, tmp_path / "again")
    train_here(reset, Classify, tmp_path / "again")
    whole = newest(tmp_path / "whole")
    again = newest(tmp_path / "again")
    for file in ("model", "optimizer"):
        torch.testing.assert_close(again.tensors[file], whole.tensors[file], rtol=0, atol=0)
    assert float(again.tensors["optimizer"]["0.weight/step"]) == 6
    # Another wish, of a start without the flag in between, is heeded again.
    kept = changed(reset, train={"steps": 10}, optim={"reset": False})
    train_here(kept, Classify, tmp_path / "again")
    train_here(changed(reset, train={"steps": 12}), Classify, tmp_path / "again")
    assert float(newest(tmp_path / "again").tensors["optimizer"]["0.weight/step"]) == 2
    # So is one for another optimizer.
    back = changed(reset, train={"steps": 13}, optim={"name": "sgd"})
    assert train_here(back, Classify, tmp_path / "again").step == 13


def test_ranks_refuse_together(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    train_on(2, config, Classify, tmp_path)
    with pytest.raises(RanksFailed) as caught:
        train_on(2, changed(config, optim={"lr": 0.5}), Classify, tmp_path)
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        assert "optim.lr 0.1 -> 0.5" in text
