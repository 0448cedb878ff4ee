"""A checkpoint is evaluated as the run did it, on any number of ranks, and its model can be
loaded."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import drumline
from drumline.base.errors import CheckpointError, UsageError
from drumline.config.flags import Setting, check_layer
from drumline.config.schema import CheckpointConfig
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.training.job.job import make_manager
from drumline.training.run_context import HOOKS_FILE
from drumline.training.saved.saved_run import evaluate_run, find_checkpoint, open_run
from tests.jobs import Classify, Everything, Points, make_config, newest, train_here, train_on
from tests.ranks import run_ranks


class Pictures(drumline.Hook):
    """Logs an image before each evaluation."""

    def before_evaluation(self, run: drumline.Run) -> None:
        run.log("picture", torch.zeros(2, 2))


class Averaged(Everything):
    """Evaluates with an average of the weights, so that an evaluation of the weights themselves
    would differ."""

    def hooks(self) -> list[drumline.Hook]:
        return [drumline.EarlyStopping("loss"), drumline.EMA(0.8), Pictures()]


class Elsewhere(Averaged):
    """On a machine without the training data."""

    def train_data(self) -> Any:
        raise FileNotFoundError("the training data")


def evaluate_here(run: Path, which: str | int, data: str | None = None) -> dict[str, Any]:
    few = [
        Setting("train.batch_size", 1, "test"),
        Setting("optim.name", "nowhere:Optimizer", "test"),
    ]
    saved = open_run(run, which, task=Elsewhere, overrides=check_layer(few))
    ddp = make_manager(saved.config)
    ddp.setup()
    try:
        return evaluate_run(saved, ddp, data)
    finally:
        ddp.cleanup()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks; the last checkpoint and the best are of different steps."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train_on(2, make_config(epochs=3, dropout=0.1), Averaged, run)
    return run


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    events = read_events(run / "events" / "rank-00000.jsonl")
    return {
        event["step"]: {name: event[name] for name in ("loss", "accuracy")}
        for event in events
        if event["kind"] == "evaluation"
    }


@pytest.mark.world_size(4)
@pytest.mark.parametrize("world_size", [1, 4])
def test_an_evaluation_is_that_of_the_run_bit_for_bit(trained: Path, world_size: int) -> None:
    files = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    expected = evaluations(trained)
    for which in ("last", catalog.list_steps(trained / "checkpoints")[0]):
        for result in run_ranks(world_size, evaluate_here, trained, which):
            assert result["metrics"] == expected[result["step"]]
            assert (result["samples"], result["world_size"]) == (29, world_size)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == files


def test_other_data_is_evaluated_with_the_model_of_the_run(trained: Path) -> None:
    result = evaluate_here(trained, "last", "tests.jobs:Points")
    model = drumline.load(trained, "last", ema=True, task=Everything)
    points = Points()
    loss = functional.cross_entropy(model(points.inputs.float()), points.targets)
    assert result["samples"] == len(points) == 37
    assert result["metrics"]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    with pytest.raises(UsageError, match="there is no file or folder nowhere"):
        evaluate_here(trained, "last", "nowhere")


def test_the_model_is_loaded_and_nothing_of_the_caller_is_changed(trained: Path) -> None:
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = drumline.load(trained, "last", task=Everything)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not any(module.training for module in model.modules())
    weights = newest(trained).tensors["model"]
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    average = newest(trained).tensors[HOOKS_FILE]
    for name, value in (
        drumline.load(trained, "last", ema=True, task=Everything).state_dict().items()
    ):
        assert torch.equal(value, average[f"1/average/{name}"])
    assert not torch.equal(average["1/average/0.weight"], weights["0.weight"])


def test_the_screen_says_which_weights_were_loaded(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = catalog.list_steps(trained / "checkpoints")[-1]
    drumline.load(trained, "last", task=Everything)
    drumline.load(trained, "last", ema=True, task=Everything)
    assert capsys.readouterr().err == (
        f"drumline: loaded step {step} of {trained}: the weights as trained; ema=True loads their average (EMA), which "
        "evaluate and predict use\n"
    )
    train_here(make_config(epochs=1), Classify, tmp_path)
    capsys.readouterr()
    drumline.load(tmp_path, "last", task=Classify)
    assert capsys.readouterr().err == "", "there is one kind of weights"


def test_which_checkpoint(trained: Path, tmp_path: Path) -> None:
    steps = catalog.list_steps(trained / "checkpoints")
    expected = evaluations(trained)
    best = max(steps, key=lambda step: (expected[step]["accuracy"], step))
    assert find_checkpoint(trained, "best").name == catalog.folder_name(best)
    assert find_checkpoint(trained, "last").name == catalog.folder_name(steps[-1])
    assert find_checkpoint(trained, str(steps[0])).name == catalog.folder_name(steps[0])
    listed = ", ".join(map(str, steps))
    with pytest.raises(
        UsageError,
        match=rf"has no checkpoint of step 9999\n  try: choose one of its steps: {listed}",
    ):
        find_checkpoint(trained, 9999)
    with pytest.raises(
        UsageError,
        match=r"there is no checkpoint 'newest'\n  try: name it best, last, or by its step",
    ):
        find_checkpoint(trained, "newest")
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(
        CheckpointError,
        match=r"no complete checkpoint in .*\n  - step-00000003 was skipped: .*\n  try: rerun its command",
    ):
        find_checkpoint(tmp_path, "last")
    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    file = find_checkpoint(damaged, "last") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its checksum differs"):
        find_checkpoint(damaged, steps[-1])


def test_code_that_the_checkpoint_names_is_imported_only_where_no_task_is_given(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = catalog.read_document

    def changed(path: Path, name: str) -> Any:
        document = read(path, name)
        if name == "progress":
            # as in version 0.1, or made to have the code imported
            document["facts"].pop("best_metric")
            document["facts"]["task"] = "nowhere:Task"
        return document

    best = find_checkpoint(trained, "best")
    monkeypatch.setattr(catalog, "read_document", changed)
    assert open_run(trained, "last", task=Averaged).task is Averaged
    with pytest.raises(UsageError, match="there is no module 'nowhere'"):
        open_run(trained, "last")
    assert find_checkpoint(trained, "best") == best, "as the event at the end of the run has it"
    monkeypatch.setattr(RunFolder, "event_file", lambda self, rank: self.path / "nowhere")
    with pytest.raises(
        UsageError,
        match=r"of version 0\.1, which recorded .*\n  try: choose the last \(--which last",
    ):
        find_checkpoint(trained, "best")


def test_settings_are_the_checkpoints_unless_others_are_given(trained: Path) -> None:
    given = check_layer([Setting("train.eval_batch_size", 3, "--train.eval_batch_size")])
    saved = open_run(trained, "last", task=Everything, overrides=given)
    assert (
        saved.config.train.eval_batch_size,
        saved.config.train.epochs,
        saved.config.model.dropout,
    ) == (3, 3, 0.1)


def test_a_checkpoint_that_lacks_a_file_is_named_when_no_other_was_evaluated(
    tmp_path: Path,
) -> None:
    """The newest alone was evaluated, and it has lost a part."""
    config = replace(
        make_config(epochs=1), checkpoint=CheckpointConfig(every_steps=2, every_epochs=0)
    )
    train_here(config, Classify, tmp_path)
    (find_checkpoint(tmp_path, "best") / "model.safetensors").unlink()
    with pytest.raises(UsageError) as caught:
        find_checkpoint(tmp_path, "best")
    assert str(caught.value) == (
        f"no checkpoint in {tmp_path / 'checkpoints'} was evaluated for 'accuracy', so none is the best\n"
        "  - step-00000005 was skipped: model.safetensors is missing\n"
        '  try: choose the last (--which last, which="last"), or one by its step'
    )


def test_without_evaluation_there_is_no_best(tmp_path: Path) -> None:
    class NoEvaluation(Classify):
        def eval_data(self) -> Any:
            return None

    train_here(make_config(epochs=1), NoEvaluation, tmp_path)
    with pytest.raises(
        UsageError,
        match=r"was evaluated for 'accuracy', so none is the best\n  try: choose the last \(--which last",
    ):
        find_checkpoint(tmp_path, "best")
    saved = open_run(tmp_path, "last", task=NoEvaluation)
    ddp = make_manager(saved.config)
    ddp.setup()
    with pytest.raises(UsageError, match="NoEvaluation has no evaluation data"):
        evaluate_run(saved, ddp)
    ddp.cleanup()
