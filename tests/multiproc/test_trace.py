"""`log.trace`: what two ranks write, that a resume continues the file, and that nothing is written
without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.base.errors import TrainingError, UsageError
from drumline.config.schema import CheckpointConfig, Config, LogConfig, OptimConfig
from drumline.runs.events import read_events
from drumline.training.loop import Loop
from drumline.training.steps.eager import TrainStep
from tests.jobs import NUM_SAMPLES, Classify, Normalised, make_config, train_here, train_on

ADAM = OptimConfig(name="adamw", lr=0.01)


def traced(**settings: Any) -> Config:
    config = make_config(**{"optim": ADAM, **settings})
    return replace(config, log=LogConfig(every_steps=2, display="none", trace=True))


def lines(run: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    events = read_events(run / "trace" / f"rank-{rank:05d}.jsonl")
    return [line for line in events if line["kind"] == kind]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_write_every_sample_once_and_rank_0_the_tensors(
    tmp_path: Path, accumulate: int
) -> None:
    config = traced(epochs=1, accumulate=accumulate)
    train_on(2, config, Normalised, tmp_path)
    train_here(config, Normalised, tmp_path / "alone")
    steps = [lines(tmp_path, rank, "step") for rank in (0, 1)]
    assert [len(step) for step in steps] == [5, 5]

    def samples(traces: list[list[dict[str, Any]]]) -> dict[tuple[int, int], tuple[int, str]]:
        return {
            (line["step"], position): found
            for trace in traces
            for line in trace
            for batch in line["batches"]
            for position, *found in zip(
                range(batch["low"], batch["high"]), batch["indices"], batch["samples"], strict=True
            )
        }

    expected = samples(steps)
    assert sorted(position for _, position in expected) == list(range(NUM_SAMPLES))
    assert sorted(index for index, _ in expected.values()) == list(range(NUM_SAMPLES))
    assert expected == samples([lines(tmp_path / "alone", 0, "step")]), (
        "another world, the same samples"
    )
    names = set(steps[0][0]["tensors"])
    assert {"0.weight", "1.running_mean", "0.weight/exp_avg_sq", "optimizer.json"} <= names
    assert steps[0][0]["tensors"]["0.weight"] != steps[0][1]["tensors"]["0.weight"]
    assert "tensors" not in steps[1][0]
    (start,) = lines(tmp_path, 1, "start")
    assert (start["world_size"], start["step"]) == (2, 0)
    for kind in ("evaluation", "evaluated"):
        assert [line["step"] for line in lines(tmp_path, 0, kind)] == [5]
    assert "loss" in lines(tmp_path, 0, "evaluated")[0]["metrics"]


def test_a_placeholder_is_no_sample(tmp_path: Path) -> None:
    train_on(2, traced(epochs=1, samples=9), Classify, tmp_path)
    assert [len(lines(tmp_path, rank, "step")[-1]["batches"]) for rank in (0, 1)] == [1, 0]


def test_a_resumed_run_continues_in_the_same_file(tmp_path: Path) -> None:
    keep = CheckpointConfig(every_steps=3, keep_last=9)
    train_here(traced(steps=3, checkpoint=keep), Classify, tmp_path)
    trace = tmp_path / "trace" / "rank-00000.jsonl"
    trace.write_text(trace.read_text() + '{"kind": "step", "st')
    train_here(traced(steps=6, checkpoint=keep), Classify, tmp_path)
    assert [start["step"] for start in lines(tmp_path, 0, "start")] == [0, 3]
    assert [line["step"] for line in lines(tmp_path, 0, "step")] == [1, 2, 3, 4, 5, 6]
    before = lines(tmp_path, 0, "step")[2]
    after = lines(tmp_path, 0, "start")[1]
    assert after["tensors"] == before["tensors"], "what was restored is what was saved"


class WithScratch(Classify):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        return model


def test_buffers_that_no_checkpoint_holds_are_listed_apart(tmp_path: Path) -> None:
    train_here(traced(steps=1), WithScratch, tmp_path)
    (line,) = lines(tmp_path, 0, "step")
    assert list(line["unsaved"]) == ["scratch"]
    assert "scratch" not in line["tensors"]


def test_a_full_disk_is_reported(tmp_path: Path, small_disk: Callable[..., Path]) -> None:
    (small_disk("size=4k", "trace") / "filler").write_bytes(bytes(4096))
    with pytest.raises(
        TrainingError, match=r"trace/rank-00000\.jsonl could not be written: No space left"
    ) as caught:
        train_here(traced(steps=1), Classify, tmp_path)
    assert "without --log.trace" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be used: it is a file, not a folder \(trace\)"):
        train_here(traced(steps=1), Classify, tmp_path)


def test_without_it_the_step_is_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    take_step = Loop.take_step

    def look(loop: Loop, step: Any) -> None:
        kinds.append(type(loop._train_step))
        take_step(loop, step)

    monkeypatch.setattr(Loop, "take_step", look)
    train_here(make_config(steps=2), Classify, tmp_path)
    assert set(kinds) == {TrainStep}
    assert not (tmp_path / "trace").exists()
