"""Predictions over a dataset: in the order of the samples, the same bytes on any number of
ranks."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import drumline
from drumline.base.errors import UsageError
from drumline.cli import main
from drumline.config.flags import Setting, check_layer
from drumline.training.job.job import make_manager
from drumline.training.saved.saved_run import (
    as_array,
    as_lines_of_json,
    open_run,
    predict_run,
    prediction_data,
    rows_of,
    write_array,
)
from drumline.training.tasks.base import Task
from tests.jobs import Classify, Points, make_config, train_here
from tests.ranks import RanksFailed, run_ranks


class Predicted(Classify):
    """Reads `data.dir`, and predicts probabilities from a batch that `on_device` has changed."""

    def eval_data(self) -> Any:
        folder = self.config.data.dir
        if folder is None:
            return Points(29)
        return [torch.from_numpy(row) for row in np.load(Path(folder) / "points.npy")]

    def on_device(self, batch: Any) -> Any:
        inputs = batch[0] if isinstance(batch, list) else batch
        return inputs * 2, batch[1] if isinstance(batch, list) else None

    def predict(self, model: nn.Module, batch: Any) -> Any:
        assert not self.training
        assert not model.training
        return torch.softmax(model(batch[0]), 1)

    def hooks(self) -> list[drumline.Hook]:
        return [drumline.EMA(0.5)]


class Thirteen(IterableDataset[Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Points(13).inputs)


class Streamed(Predicted):
    def metrics(self) -> Any:
        raise AssertionError("predictions need no metrics, which might not be mergeable")

    def eval_data(self) -> Any:
        return Thirteen()


def predict_here(run: Path, task: type[Task], data: str | None, ending: str) -> bytes:
    """What the file would hold; nothing on ranks other than 0."""
    given = check_layer([Setting("train.eval_batch_size", 4, "--train.eval_batch_size")])
    saved = open_run(run, "last", task=task, overrides=given)
    ddp = make_manager(saved.config)
    ddp.setup()
    try:
        if ending == ".jsonl":
            return b"".join(predict_run(saved, ddp, data, encode=as_lines_of_json))
        file = io.BytesIO()
        write_array(file, predict_run(saved, ddp, data, encode=as_array))
        return file.getvalue()
    finally:
        ddp.cleanup()


def task_of(run: Path, task: type[Task]) -> Task:
    return task(open_run(run, "last", task=task).config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(make_config(epochs=2), Predicted, run)
    return run


def expected(run: Path, inputs: Tensor, tmp_path: Path) -> Tensor:
    """By hand: with the average, as the run evaluates."""
    to = tmp_path / "average.safetensors"
    assert main(["export", str(run), "--which", "last", "--ema", "--to", str(to), "--force"]) == 0
    from safetensors.torch import load_file

    model = Predicted(make_config()).model().eval()
    model.load_state_dict(load_file(to))
    with torch.no_grad():
        return torch.softmax(model(inputs * 2), 1)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("task", "ending", "world_size"),
    [(Predicted, ".jsonl", 2), (Predicted, ".npy", 4), (Streamed, ".jsonl", 3)],
)
def test_the_same_bytes_on_any_number_of_ranks(
    trained: Path, tmp_path: Path, task: type[Task], ending: str, world_size: int
) -> None:
    """29 samples in 8 batches of 4, and 13 in 4: some ranks have fewer batches than others."""
    by_hand = expected(trained, Points(29 if task is Predicted else 13).inputs, tmp_path)
    alone = predict_here(trained, task, None, ending)
    assert run_ranks(world_size, predict_here, trained, task, None, ending) == [
        alone,
        *[b""] * (world_size - 1),
    ]
    rows = (
        np.load(io.BytesIO(alone))
        if ending == ".npy"
        else np.array(list(map(json.loads, alone.splitlines())))
    )
    assert rows.dtype == np.float64
    assert rows.shape == tuple(by_hand.shape)
    assert np.abs(rows - by_hand.numpy()).max() < 1e-12


class Apart(IterableDataset[Tensor]):
    """The ranks read different samples."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Points(13).inputs + int(os.environ.get("RANK", "0")))


class ReadApart(Predicted):
    def eval_data(self) -> Any:
        return Apart()


@pytest.mark.world_size(2)
def test_ranks_that_read_different_streams_are_an_error(trained: Path) -> None:
    with pytest.raises(RanksFailed, match="ranks differ in the samples that they read") as failed:
        run_ranks(2, predict_here, trained, ReadApart, None, ".jsonl")
    assert failed.value.errors.keys() == {0, 1}


MORE = """
import torch

class More:
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.full((6,), float(index), dtype=torch.float64)
"""


def test_data_of_ones_own(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.WARNING, "drumline")
    points = np.arange(5)[:, np.newaxis] * np.ones((1, 6))
    np.save(tmp_path / "points.npy", points)
    (tmp_path / "more_points.py").write_text(MORE)
    for data in (str(tmp_path), f"{tmp_path}/more_points.py:More"):
        lines = predict_here(trained, Predicted, data, ".jsonl").splitlines()
        inputs = torch.from_numpy(np.arange(len(lines))[:, np.newaxis] * np.ones((1, 6)))
        assert len(lines) == (5 if data == str(tmp_path) else 7)
        assert (
            np.abs(
                np.array(list(map(json.loads, lines))) - expected(trained, inputs, tmp_path).numpy()
            ).max()
            < 1e-12
        )
    assert caplog.messages == []
    with pytest.raises(UsageError, match=r"there is no file or folder nowhere \(looked in "):
        prediction_data(task_of(trained, Predicted), "nowhere")


def test_a_task_without_one_evaluation_set_needs_data(trained: Path) -> None:
    class Several(Predicted):
        def eval_data(self) -> Any:
            return {"a": Points(3), "b": Points(4)}

    class NoSet(Predicted):
        def eval_data(self) -> Any:
            return None

    with pytest.raises(
        UsageError,
        match=r"Several.eval_data\(\) gives several evaluation sets\n  try: name a dataset",
    ):
        prediction_data(task_of(trained, Several), None)
    with pytest.raises(UsageError, match=r"NoSet.eval_data\(\) gives no evaluation data"):
        prediction_data(task_of(trained, NoSet), None)


def test_rows_of_what_a_task_may_predict() -> None:
    scores = torch.arange(4.0).reshape(2, 2).bfloat16()
    assert rows_of(scores, 2) == [[0.0, 1.0], [2.0, 3.0]]
    assert rows_of({"scores": scores, "text": ["a", "b"]}, 2) == [
        {"scores": [0.0, 1.0], "text": "a"},
        {"scores": [2.0, 3.0], "text": "b"},
    ]
    assert rows_of((scores[:, 0], np.array([5, 6])), 2) == [[0.0, 5], [2.0, 6]]
    assert rows_of([torch.tensor([1]), np.float32(2)], 2) == [[1], 2.0]
    boxes = [
        {"boxes": torch.ones(1, 2), "score": np.float32(0.5)},
        {"boxes": torch.ones(0, 2), "score": 1},
    ]
    assert rows_of(boxes, 2) == [{"boxes": [[1.0, 1.0]], "score": 0.5}, {"boxes": [], "score": 1}]
    assert as_lines_of_json(torch.tensor([1.0, float("nan")]), 2) == b'1.0\n"nan"\n'
    with pytest.raises(
        UsageError,
        match=r"predict\(\) returned a Tensor of shape \[2, 2\] for a batch of 3 samples",
    ):
        rows_of(scores, 3)
    with pytest.raises(UsageError, match=r"predict\(\) returned a dict for a batch of 3 samples"):
        rows_of({}, 3)
    with pytest.raises(
        UsageError,
        match=r"predict\(\) returned a str for a batch of 3 samples\n  try: return a tensor",
    ):
        rows_of("abc", 3)


def test_an_array_is_one_array() -> None:
    file = io.BytesIO()
    parts = [
        as_array(torch.ones(2, 3).bfloat16(), 2),
        as_array(np.zeros((1, 3), dtype=np.float32), 1),
    ]
    write_array(file, iter(parts))
    found = np.load(io.BytesIO(file.getvalue()), allow_pickle=False)
    assert found.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    turned = as_array(torch.arange(6.0).reshape(3, 2).t(), 2)
    with pytest.raises(
        UsageError, match=r"predictions of float32 \[3\] are followed by float32 \[2\], and a \.npy"
    ):
        write_array(io.BytesIO(), iter([turned, as_array(torch.ones(1, 2), 1)]))
    file = io.BytesIO()
    write_array(file, iter([turned]))
    assert np.load(io.BytesIO(file.getvalue())).tolist() == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(
        UsageError, match=r"predict\(\) returned a list, and a \.npy file holds one array"
    ):
        as_array([1, 2], 2)


def test_refused_commands(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.npy"
    there.write_text("mine")
    for words, text in {
        (): "no RUN was given",
        (str(trained), "--to", str(there)): "there.npy exists already",
        (
            str(trained),
            "--to",
            "a.csv",
        ): "a.csv ends neither in .jsonl nor in .npy\n  try: give --to a.jsonl",
        (str(trained), "a", "b"): "'b': unexpected argument",
    }.items():
        assert main(["predict", *words]) == 2
        assert text in capsys.readouterr().err
    assert there.read_text() == "mine"
