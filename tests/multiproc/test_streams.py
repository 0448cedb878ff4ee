"""Whole runs on streams: the same training on any world, bit-identical after a kill, refused where
that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import CheckpointError, UsageError
from drumline.config.schema import CheckpointConfig, Config
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.tasks.base import Task
from tests import stream_jobs
from tests.jobs import assert_same_bits, make_config, newest, train_each_on, train_here, train_on
from tests.multiproc.test_resume import ADAM, EVERY_STEP, interrupted_at
from tests.ranks import RanksFailed, run_ranks
from tests.stream_jobs import ClassifyOwn, ClassifyStream

# Python 3.12 warns about every fork of a process with threads; torch's worker processes are forked.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def hard_config(**settings: Any) -> Config:
    """Dropout, augmentation, accumulation, a schedule, and 37 samples in batches of 8: an uneven
    last batch."""
    return make_config(
        **{
            "dropout": 0.3, "augment": True, "accumulate": 2, "optim": ADAM, "checkpoint": EVERY_STEP, "steps": 12,
            **settings,
        }
    )  # fmt: skip


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


@pytest.mark.soak
def test_a_plain_stream_trains_the_same_on_any_world_and_resumes_on_another(tmp_path: Path) -> None:
    config = make_config(augment=True, accumulate=2, steps=12, checkpoint=EVERY_STEP)
    weights = []
    evaluations = []
    for worlds in ([1], [3, 2]):
        run = tmp_path / str(worlds[0])
        if len(worlds) > 1:
            interrupted_at(7, worlds[0], config, ClassifyStream, run)
        train_on(worlds[-1], config, ClassifyStream, run)
        weights.append(newest(run).tensors["model"])
        evaluations.append(
            [(event["samples"], event["step"]) for event in events(run, "evaluation")]
        )
        losses = [event["loss"] for event in events(run, "evaluation")]
        assert losses == pytest.approx(
            [event["loss"] for event in events(tmp_path / "1", "evaluation")]
        )
    for weight in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weight[name], tensor, rtol=0, atol=1e-9)
    # Two whole epochs of five steps, and the end.
    assert evaluations == [[(29, 5), (29, 10), (29, 12)]] * 2
    start, *_ = events(tmp_path / "3", "start")
    assert start["train_samples"] is start["eval_samples"] is start["epochs"] is None


@pytest.mark.parametrize(
    ("task", "world_size", "step", "workers"),
    [pytest.param(ClassifyStream, 2, 5, 1, marks=pytest.mark.soak), (ClassifyOwn, 3, 5, 0)],
)
def test_killed_and_resumed_is_bit_identical(
    tmp_path: Path, task: type[Task], world_size: int, step: int, workers: int
) -> None:
    config = hard_config(workers=workers, steps=8)
    interrupted_at(step, world_size, config, task, tmp_path / "killed")
    train_each_on(world_size, *((config, task, tmp_path / run) for run in ("killed", "whole")))
    assert_same_bits(newest(tmp_path / "killed"), newest(tmp_path / "whole"))
    assert [event["step"] for event in events(tmp_path / "killed", "resume")] == [step]
    assert ("data" in newest(tmp_path / "whole").documents) == (task is ClassifyOwn)


def test_a_resumable_stream_is_refused_on_another_world(tmp_path: Path) -> None:
    interrupted_at(4, 2, hard_config(), ClassifyOwn, tmp_path)
    before = newest(tmp_path)
    for now in (1, 3):
        with pytest.raises(RanksFailed) as caught:
            train_on(now, hard_config(), ClassifyOwn, tmp_path)
        assert len(caught.value.errors) == now  # every rank reports it, none waits
        for text in caught.value.errors.values():
            assert (
                f"the state of the stream OwnPlace was saved on 2 ranks, now there are {now}"
                in text
            )
            assert "try: resume on 2 ranks, or begin a new run with a map-style dataset" in text
        assert_same_bits(newest(tmp_path), before)


def test_each_rank_has_its_own_state_in_the_checkpoint(tmp_path: Path) -> None:
    train_on(2, hard_config(), ClassifyOwn, tmp_path)
    saved = newest(tmp_path)
    ranks = [dict(document["dict"]) for document in saved.documents["data"]["ranks"]]
    assert [(rank["rank"], rank["world_size"], rank["position"]) for rank in ranks] == [
        (0, 2, 96),
        (1, 2, 96),
    ]
    # 48 samples for each, out of 19 and of 18: two rounds, and 10 or 12 samples of the third.
    assert [(rank["round"], rank["taken"]) for rank in ranks] == [(2, 10), (2, 12)]
    counts = [tensor.tolist() for _, tensor in sorted(saved.tensors["data"].items())]
    assert counts == [[3] * 10 + [2] * 9, [3] * 12 + [2] * 6]


def test_a_checkpoint_without_the_state_of_the_dataset_is_refused(tmp_path: Path) -> None:
    train_here(make_config(steps=3, checkpoint=EVERY_STEP), ClassifyStream, tmp_path)
    with pytest.raises(
        CheckpointError, match="is at sample 24, but holds no state of the stream OwnPl"
    ):
        train_here(make_config(steps=6, checkpoint=EVERY_STEP), ClassifyOwn, tmp_path)


def test_epochs_of_a_stream_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the length of the stream Plain is unknown") as caught:
        train_here(make_config(epochs=2), ClassifyStream, tmp_path)
    assert "try: give --train.steps" in str(caught.value)


def test_a_plain_stream_that_splits_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        train_on(2, make_config(steps=2), stream_jobs.SplitsItself, tmp_path)
    for text in caught.value.errors.values():
        assert "ranks differ in the next sample of the stream _Split: rank 0" in text
        assert (
            "let every rank read the same samples in the same order: Drumline splits them" in text
        )


def logged(config: Config, task: type[Task], run: Path) -> list[str]:
    """Train, and give back what was logged."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(handler)
    train_here(config, task, run)
    return lines


def test_a_resumable_stream_that_is_the_same_everywhere_is_a_warning(tmp_path: Path) -> None:
    config = make_config(steps=2)
    first, second = run_ranks(2, logged, config, stream_jobs.ForgetsItsRank, tmp_path)
    assert second == []
    assert any(
        "all 2 ranks read the same next sample of the stream _Same" in line for line in first
    )
    assert any(
        "nothing is saved before the end: set --checkpoint.every_steps" in line for line in first
    )
    saved = CheckpointConfig(every_steps=5)
    assert run_ranks(
        2, logged, make_config(steps=2, checkpoint=saved), ClassifyOwn, tmp_path / "own"
    ) == [[], []]


def test_evaluation_streams_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        train_on(2, make_config(steps=2), stream_jobs.EvaluatesItsPart, tmp_path)
    assert (
        "rank 1 read 2 other evaluation batches from its stream than rank 0, which read 6"
        in caught.value.errors[1]
    )
    assert "let every rank read the whole evaluation stream" in caught.value.errors[1]


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"state_dict\(\) of the training data/dataset/seen .* it is a set"
    ):
        train_here(make_config(steps=2), stream_jobs.KeepsASet, tmp_path)
    assert not catalog.list_steps(tmp_path / "checkpoints")
