"""A run that is interrupted and resumed is the same run, bit for bit, and survives what happens to
its checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import decode_state
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress
from drumline.training.tasks.base import Loss, Task
from tests.hooked_jobs import Hooked, HookedNormalised
from tests.jobs import (
    Classify,
    Strided,
    assert_same_bits,
    make_config,
    newest,
    train_each_on,
    train_here,
    train_on,
)
from tests.ranks import RanksFailed, run_ranks

EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)
ADAM = OptimConfig(name="adamw", lr=0.01, schedule="cosine", warmup_steps=3, clip_norm=1.0)


def hard_config(**settings: object) -> Config:
    """Dropout, augmentation, accumulation, a schedule, an uneven last batch."""
    return make_config(
        dropout=0.3, augment=True, accumulate=2, optim=ADAM, checkpoint=EVERY_STEP, **settings
    )  # type: ignore[arg-type]


def die_after(step: int, config: Config, task: type[Task], run: Path) -> None:
    """Train, and end this process with -9 right after the save of a step, on every rank."""
    save = Saver.save

    def save_and_die(self: Saver, progress: Progress, metrics: Mapping[str, float]) -> None:
        save(self, progress, metrics)
        if progress.step == step:
            self.writer.wait()
            self._job.ddp.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    Saver.save = save_and_die  # type: ignore[method-assign]
    train_here(config, task, run)


def interrupted_at(step: int, world_size: int, config: Config, task: type[Task], run: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(world_size, die_after, step, config, task, run)
    assert set(caught.value.errors.values()) == {"the process ended without a word"}
    assert catalog.list_steps(run / "checkpoints")[-1] == step


def train_whole_and_killed(config: Config, task: type[Task], folder: Path) -> Progress:
    train_here(config, task, folder / "whole")
    return train_here(config, task, folder / "killed")


@pytest.mark.parametrize(
    ("world_size", "step", "task", "workers"),
    [(2, 7, Hooked, 1), pytest.param(4, 4, HookedNormalised, 0, marks=pytest.mark.soak)],
)
def test_killed_and_resumed_is_bit_identical(
    tmp_path: Path, world_size: int, step: int, task: type[Task], workers: int
) -> None:
    # BatchNorm needs two samples or more in each of 4 ranks' 2 micro-batches.
    config = hard_config(
        workers=workers, batch_size=16 if task is HookedNormalised else 8, epochs=3
    )
    interrupted_at(step, world_size, config, task, tmp_path / "killed")
    ends: list[Progress] = run_ranks(world_size, train_whole_and_killed, config, task, tmp_path)
    assert_same_bits(newest(tmp_path / "killed"), newest(tmp_path / "whole"))
    events = list(read_events(tmp_path / "killed" / "events" / "rank-00000.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "resume"] == [step]
    assert_stopped_early(ends, tmp_path)
    assert_average_by_hand(newest(tmp_path / "killed"))


def assert_stopped_early(ends: list[Progress], folder: Path) -> None:
    """All ranks stopped at the second evaluation: the first one, before the kill, is not
    forgotten."""
    whole = list(read_events(folder / "whole" / "events" / "rank-00000.jsonl"))
    (step,) = {event["step"] for event in whole if event["kind"] == "end"}
    assert [end.step for end in ends] == [step] * len(ends)
    assert len([event for event in whole if event["kind"] == "evaluation"]) == 2
    samples = []
    for run in ("whole", "killed"):
        for rank in range(len(ends)):
            events = list(read_events(folder / run / "events" / f"rank-{rank:05d}.jsonl"))
            assert events[-1]["stopped"].startswith(
                "loss has not improved in 1 evaluation; the best was "
            )
            samples.append([event["value"] for event in events if event["kind"] == "logged"])
    assert len(samples[0]) == 2
    assert samples == [samples[0], *[[]] * (len(ends) - 1)] * 2, (
        "rank 0 alone logs, and the same after the kill"
    )


def assert_average_by_hand(snapshot: store.Snapshot) -> None:
    _, ema, by_hand, _ = snapshot.documents["hooks"]
    assert (ema["name"], by_hand["name"]) == ("EMA", "ByHand")
    tensors = snapshot.tensors["hooks"]
    averages, expected = (
        decode_state(hook["state"], tensors.__getitem__)["average"] for hook in (ema, by_hand)
    )
    assert averages.keys() == expected.keys() == snapshot.tensors["model"].keys()
    for name, average in averages.items():
        assert torch.allclose(average, expected[name], rtol=1e-12, atol=1e-14), name
        assert name.endswith("num_batches_tracked") or not torch.equal(
            average, snapshot.tensors["model"][name]
        )


@pytest.mark.soak
def test_a_static_graph_resumes_bit_for_bit(tmp_path: Path) -> None:
    """There DDP settles its buckets in the second backward pass only."""
    config = replace(hard_config(steps=6), dist=DistConfig(static_graph=True, bucket_cap_mb=0.0002))
    interrupted_at(3, 3, config, Classify, tmp_path / "killed")
    train_each_on(3, *((config, Classify, tmp_path / run) for run in ("killed", "whole")))
    assert_same_bits(newest(tmp_path / "killed"), newest(tmp_path / "whole"))


@pytest.mark.soak
def test_parameters_in_any_order_of_memory_resume_bit_for_bit(tmp_path: Path) -> None:
    configs = [
        replace(hard_config(steps=6), optim=optim)
        for optim in (ADAM, OptimConfig(lr=0.1, momentum=0.9))
    ]
    for config in configs:
        interrupted_at(4, 2, config, Strided, tmp_path / f"killed {config.optim.name}")
    runs = [
        (config, Strided, f"{run} {config.optim.name}")
        for config in configs
        for run in ("whole", "killed")
    ]
    train_each_on(2, *((config, task, tmp_path / run) for config, task, run in runs))
    for config in configs:
        killed, whole = (
            newest(tmp_path / f"{run} {config.optim.name}") for run in ("killed", "whole")
        )
        assert_same_bits(killed, whole)


def test_a_metric_that_was_not_there_before_is_no_hindrance(tmp_path: Path) -> None:
    train_here(make_config(checkpoint=EVERY_STEP, steps=3), Classify, tmp_path)
    assert train_here(make_config(checkpoint=EVERY_STEP, steps=6), MeasuresMore, tmp_path).step == 6


class MeasuresMore(Classify):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total, metrics={**loss.metrics, "more": loss.total.detach()})


def test_another_layout_of_buckets_is_reported(tmp_path: Path) -> None:
    train_here(make_config(steps=3), Classify, tmp_path)
    train_here(
        replace(make_config(steps=4), dist=DistConfig(bucket_cap_mb=1.0)), Classify, tmp_path
    )
    warnings = [
        event["message"]
        for event in read_events(tmp_path / "events" / "rank-00000.jsonl")
        if event["kind"] == "warning"
    ]
    assert "dist.bucket_cap_mb changed since the checkpoint: 25.0 -> 1.0" in warnings


def test_another_world_size_continues_the_run(tmp_path: Path) -> None:
    config = make_config(epochs=3, checkpoint=EVERY_STEP)
    interrupted_at(4, 3, config, Classify, tmp_path)
    assert train_on(2, config, Classify, tmp_path).step == 15
    warnings = [
        event["message"]
        for event in read_events(tmp_path / "events" / "rank-00000.jsonl")
        if event["kind"] == "warning"
    ]
    assert warnings == [
        "the number of ranks changed since the checkpoint: 3 -> 2; the samples are the same, but not the bits "
        "(--train.exact elastic keeps both)"
    ]


def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    config = hard_config(steps=6)
    damages = ("truncate", "flip", "delete")
    interrupted_at(4, 2, config, Classify, tmp_path / "killed")
    for damage in damages:
        shutil.copytree(tmp_path / "killed", tmp_path / damage)
        file = tmp_path / damage / "checkpoints" / "step-00000004" / "model.safetensors"
        content = bytearray(file.read_bytes())
        if damage == "delete":
            file.unlink()
        elif damage == "truncate":
            file.write_bytes(content[:-7])
        else:
            content[-3] ^= 1
            file.write_bytes(content)
    train_each_on(2, *((config, Classify, tmp_path / run) for run in ("whole", *damages)))
    for damage in damages:
        assert_same_bits(newest(tmp_path / damage), newest(tmp_path / "whole"))
        events = list(read_events(tmp_path / damage / "events" / "rank-00000.jsonl"))
        (warning,) = [event["message"] for event in events if event["kind"] == "warning"]
        assert "step-00000004 was skipped: model.safetensors" in warning
        assert [event["step"] for event in events if event["kind"] == "resume"] == [3]


def test_a_run_without_a_complete_checkpoint_does_not_start_over(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    (tmp_path / "checkpoints" / "step-00000005" / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)none of the 1 checkpoints in .* is complete.*model.safetensors.*--fresh",
    ):
        train_here(make_config(epochs=1), Classify, tmp_path)
    assert catalog.list_steps(tmp_path / "checkpoints") == [5]


def test_a_finished_run_reports_it_and_changes_nothing(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    train_here(config, Classify, tmp_path)
    before = newest(tmp_path)
    assert train_here(config, Classify, tmp_path).step == 5
    assert_same_bits(newest(tmp_path), before)
    notes = [
        event["message"]
        for event in read_events(tmp_path / "events" / "rank-00000.jsonl")
        if event["kind"] == "note"
    ]
    assert notes == [
        "this run has finished; raise train.epochs or train.steps, or start a new one with --fresh"
    ]


def test_more_epochs_continue_and_a_changed_setting_is_reported(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    optim = OptimConfig(lr=0.05, weight_decay=0.0, schedule="constant", clip_norm=0.5)
    assert train_here(make_config(epochs=2, optim=optim), Classify, tmp_path).step == 10
    warnings = [
        event["message"]
        for event in read_events(tmp_path / "events" / "rank-00000.jsonl")
        if event["kind"] == "warning"
    ]
    assert "optim.lr changed since the checkpoint: 0.1 -> 0.05" in warnings


def test_fresh_moves_the_earlier_run_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(make_config(epochs=1), Classify, run)
    train_here(make_config(epochs=1), Classify, run, fresh=True)
    (aside,) = [path for path in tmp_path.iterdir() if path != run]
    assert aside.name.startswith("run.before-")
    assert_same_bits(newest(aside), newest(run))
    assert not [
        event
        for event in read_events(run / "events" / "rank-00000.jsonl")
        if event["kind"] == "resume"
    ]


def test_the_logged_losses_are_those_of_the_whole_run(tmp_path: Path) -> None:
    """Also in the line after the resume, which covers a step from before it."""
    config = make_config(checkpoint=EVERY_STEP)
    train_on(2, config, Classify, tmp_path / "whole")
    interrupted_at(5, 2, config, Classify, tmp_path / "killed")
    train_on(3, config, Classify, tmp_path / "killed")
    whole, killed = (
        {
            event["step"]: (event["loss"], event["accuracy"])
            for event in read_events(tmp_path / run / "events" / "rank-00000.jsonl")
            if event["kind"] == "train"
        }
        for run in ("whole", "killed")
    )
    assert list(whole) == [2, 4, 6, 8, 10]
    assert killed.keys() == whole.keys()
    for step, numbers in whole.items():
        assert killed[step] == pytest.approx(numbers, rel=1e-9)
