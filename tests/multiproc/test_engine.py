"""What the engine does in a step and between steps: synchronisation, precision, batch and rate,
warnings."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import Dataset

from drumline.base.errors import CheckpointError, PreflightError, TrainingError, UsageError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.job.job import build_job
from drumline.training.manager import RunManager
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Loss
from tests.jobs import (
    NO_SIDECAR,
    Classify,
    Normalised,
    Points,
    WeighTokens,
    assert_same_bits,
    make_config,
    newest,
    train_each_on,
    train_here,
    train_on,
)
from tests.ranks import RanksFailed, run_ranks


def events(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [
        event
        for event in read_events(run / "events" / f"rank-{rank:05d}.jsonl")
        if event["kind"] == kind
    ]


def count_reductions(accumulate: int) -> list[tuple[int, int]]:
    """Per step: micro-batches, and buckets that were reduced."""
    config = make_config(accumulate=accumulate, samples=32)
    with RunManager(watch=NO_SIDECAR) as ddp:
        job = build_job(config, Classify(config), ddp)
        reduced = 0

        def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read postponed annotations
            nonlocal reduced
            reduced += 1
            return allreduce_hook(dist.group.WORLD, bucket)

        job.applied.register_comm_hook(None, count)  # type: ignore[operator]
        train_step = TrainStep(job)
        counts = []
        for step in job.loader.steps():
            before = reduced
            train_step(step)
            counts.append((len(step.plan.spans), reduced - before))
        return counts


def count_of_each(accumulates: tuple[int, ...]) -> list[tuple[int, int]]:
    return [count for accumulate in accumulates for count in count_reductions(accumulate)]


def test_gradients_are_reduced_once_a_step_however_many_micro_batches() -> None:
    for counts in run_ranks(2, count_of_each, (1, 4)):
        assert counts == [(1, 1)] * 4 + [(4, 1)] * 4


class SinglePrecision(Classify):
    def model(self) -> nn.Module:
        return super().model().float()

    def train_data(self) -> Dataset[Any]:
        data = Points(self.config.data.samples)
        data.inputs = data.inputs.float()
        return data

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, (batch[0].float(), batch[1]))


def precise(precision: str, **settings: Any) -> Config:
    optim = OptimConfig(lr=0.1, schedule="linear", clip_norm=0.05)
    checkpoint = CheckpointConfig(every_steps=3, keep_last=20)
    return make_config(
        samples=64, optim=optim, precision=precision, checkpoint=checkpoint, **settings
    )


@pytest.mark.soak
def test_every_precision_resumes_bit_for_bit_with_its_scale(tmp_path: Path) -> None:
    precisions = ("fp32", "bf16", "fp16")
    train_each_on(
        2, *((precise(each), SinglePrecision, tmp_path / "whole" / each) for each in precisions)
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for each in precisions:
        for later in (12, 15, 16):
            store.remove(tmp_path / "again" / each / "checkpoints" / catalog.folder_name(later))
    train_each_on(
        2, *((precise(each), SinglePrecision, tmp_path / "again" / each) for each in precisions)
    )
    for each in precisions:
        assert events(tmp_path / "again" / each, "resume")[0]["step"] == 9
        whole = newest(tmp_path / "whole" / each)
        assert_same_bits(newest(tmp_path / "again" / each), whole)
        assert ("scaler" in whole.documents) == (each == "fp16")
        if each == "fp16":
            assert whole.documents["scaler"]["scale"] > 1


def test_gradients_are_clipped_after_the_loss_scale_is_taken_out(tmp_path: Path) -> None:
    norms = {}
    for precision in ("fp32", "fp16"):
        train_here(precise(precision), SinglePrecision, tmp_path / precision)
        norms[precision] = [event["grad_norm"] for event in events(tmp_path / precision, "train")]
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)


def test_a_batch_per_rank_grows_with_the_world_and_the_rate_with_it(tmp_path: Path) -> None:
    rates = {"none": 0.1, "linear": 0.2, "sqrt": 0.1 * 2**0.5}
    optims = {rule: OptimConfig(lr=0.1, scale_lr=rule, schedule="constant") for rule in rates}  # type: ignore[arg-type]
    configs = {
        rule: make_config(batch_size_per_rank=4, steps=2, optim=optim)
        for rule, optim in optims.items()
    }
    train_each_on(2, *((config, Classify, tmp_path / rule) for rule, config in configs.items()))
    for rule, rate in rates.items():
        (start,) = events(tmp_path / rule, "start")
        assert (start["batch_size"], start["batch_size_per_rank"]) == (8, 4)
        assert start["lr"] == pytest.approx(rate)
        assert events(tmp_path / rule, "train")[-1]["lr"] == pytest.approx(rate)
        text = (tmp_path / rule / "logs" / "rank-00000.log").read_text()
        assert "8 a step: 2 ranks x 4" in text


def test_the_rate_follows_steps_not_micro_batches_or_ranks(tmp_path: Path) -> None:
    optim = OptimConfig(lr=0.1, schedule="linear", warmup_steps=2)
    rates = []
    for world_size, accumulate in ((1, 1), (2, 2)):
        run = tmp_path / str(world_size)
        train_on(
            world_size, make_config(epochs=1, accumulate=accumulate, optim=optim), Classify, run
        )
        rates.append([event["lr"] for event in events(run, "train")])
    assert rates[0] == rates[1] == pytest.approx([0.1, 0.1 / 3 * 2, 0.1 / 3])


@pytest.mark.parametrize(("first_world", "second_world"), [(1, 2), (2, 1)])
def test_epochs_are_passes_over_the_data_on_another_world_too(
    tmp_path: Path, first_world: int, second_world: int
) -> None:
    """Another batch per rank is another global batch; an epoch is still every sample once."""
    train_on(first_world, make_config(batch_size_per_rank=4, epochs=1), Classify, tmp_path)
    progress = train_on(
        second_world, make_config(batch_size_per_rank=5, epochs=2), Classify, tmp_path
    )
    steps = {4: 10, 8: 5, 5: 8, 10: 4}  # of 37 samples, by the size of a batch
    assert progress.step == steps[4 * first_world] + steps[5 * second_world]
    assert (progress.cursor.epoch, progress.cursor.position) == (2, 0)
    assert [event["epoch"] for event in events(tmp_path, "evaluation")] == [1, 2]


def test_a_batch_per_rank_stays_the_batch_of_the_run_on_another_world(tmp_path: Path) -> None:
    """Resumed on another number of ranks: the same steps, rates and weights as if it had gone on as
    it began."""
    optim = OptimConfig(lr=0.1, scale_lr="linear", weight_decay=0.0, schedule="cosine")
    one_epoch, two_epochs = (
        make_config(batch_size_per_rank=4, epochs=epochs, optim=optim) for epochs in (1, 2)
    )
    train_on(2, one_epoch, Classify, tmp_path / "2")
    for world_size in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / str(world_size))
    for world_size in (1, 2, 3):
        train_on(world_size, two_epochs, Classify, tmp_path / str(world_size))
    expected = newest(tmp_path / "2").tensors["model"]
    for world_size in (1, 3):
        run = tmp_path / str(world_size)
        for name, tensor in newest(run).tensors["model"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
        assert [event["message"] for event in events(run, "note")] == [
            f"the global batch stays 8, as the run began (4 on each of 2 ranks): now {8 / world_size:.4g} on each of "
            f"{world_size}, at most 4 at once"
        ]
        start = list(events(run, "start"))[-1]
        assert (start["batch_size"], start["accumulate"]) == (8, -(-8 // (4 * world_size)))
        assert start["lr"] == pytest.approx(0.1 * 2)


class Frozen(Normalised):
    """A user who keeps BatchNorm's statistics as they are puts it into eval mode, for good."""

    def model(self) -> nn.Module:
        model = super().model()
        model[1].eval()  # type: ignore[index]
        return model


def test_evaluation_gives_every_module_its_own_mode_back(tmp_path: Path) -> None:
    train_here(make_config(batch_size=16), Frozen, tmp_path)
    assert newest(tmp_path).tensors["model"]["1.running_mean"].tolist() == [0.0] * 8


class SometimesWeighted(Classify):
    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        loss = super().loss(model, batch)
        return Loss(loss.total, weight=3.0) if self.calls == 3 else loss


def test_a_weight_in_some_batches_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="a weight in some batches and none in others"):
        train_here(make_config(), SometimesWeighted, tmp_path)


class Bare(Classify):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, batch).total  # type: ignore[return-value]


def test_a_loss_that_is_no_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"Bare.loss\(\) returned a Tensor, not a Loss\n  try: return drumline.Loss",
    ):
        train_here(make_config(), Bare, tmp_path)


def settings_differ(run: Path) -> str:
    import os

    optim = OptimConfig(lr=0.1 * (1 + int(os.environ["RANK"])))
    with pytest.raises(PreflightError) as caught:
        train_here(make_config(optim=optim), Classify, run)
    return str(caught.value)


def test_ranks_with_different_settings_do_not_start_and_the_setting_is_named(
    tmp_path: Path,
) -> None:
    for message in run_ranks(2, settings_differ, tmp_path):
        assert "ranks differ in the setting optim.lr: rank 0 (" in message
        assert "): 0.1; rank 1 (" in message


def test_a_resume_that_fails_leaves_the_old_config_to_be_read(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(CheckpointError, match="the checkpoint is of another model"):
        train_here(make_config(epochs=2, seed=1), Normalised, tmp_path)
    assert (tmp_path / "config.toml").read_text() == before


def test_a_static_graph_goes_with_accumulation_and_with_weights(tmp_path: Path) -> None:
    config = make_config(epochs=1, accumulate=2)
    static = replace(config, dist=DistConfig(static_graph=True))
    train_each_on(
        2, (static, WeighTokens, tmp_path / "static"), (config, WeighTokens, tmp_path / "usual")
    )
    torch.testing.assert_close(
        *(newest(tmp_path / run).tensors["model"] for run in ("static", "usual"))
    )


def test_resuming_with_other_data_or_another_task_is_warned_about(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    train_here(make_config(epochs=2, samples=41), Classify, tmp_path, name="other")
    warnings = [event["message"] for event in events(tmp_path, "warning")]
    assert "the training data changed since the checkpoint" in warnings
    assert "task changed since the checkpoint: test -> other" in warnings


class WantsAnother(Classify):
    best_metric = "acc"


def test_a_best_metric_that_is_never_reported_is_a_warning_at_the_first_evaluation(
    tmp_path: Path,
) -> None:
    train_here(make_config(epochs=3), WantsAnother, tmp_path)
    (warning,) = events(tmp_path, "warning")
    assert (warning["step"], warning["message"]) == (
        5,
        "WantsAnother.best_metric is 'acc', so no checkpoint is kept as the best: evaluations report loss, accuracy",
    )


class NoEvaluation(Classify):
    def eval_data(self) -> None:
        return None


def test_a_task_without_evaluation_data_trains(tmp_path: Path) -> None:
    assert train_on(2, make_config(), NoEvaluation, tmp_path).step == 10
    assert events(tmp_path, "evaluation") == []
    assert events(tmp_path, "end")[0]["metrics"] == {}


def test_a_dataset_smaller_than_the_batch_and_than_the_world_trains(tmp_path: Path) -> None:
    assert train_on(4, make_config(samples=3, batch_size=8), Classify, tmp_path).step == 2


def test_every_rank_logs_the_same_global_loss(tmp_path: Path) -> None:
    train_on(3, make_config(), Classify, tmp_path)
    losses = [
        [(event["step"], event["loss"]) for event in events(tmp_path, "train", rank)]
        for rank in range(3)
    ]
    assert losses[0]
    assert losses[0] == losses[1] == losses[2]


def test_a_lonely_last_sample_before_batchnorm_is_warned_about(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="Expected more than 1 value per channel"):
        train_on(1, make_config(samples=33), Normalised, tmp_path)
    (warning,) = [
        event["message"]
        for event in events(tmp_path, "warning")
        if "has one sample" in event["message"]
    ]
    assert "(33 samples in batches of 8)" in warning


class OtherData(Classify):
    def train_data(self) -> Dataset[Any]:
        import os

        return Points(30 + int(os.environ["RANK"]))


def test_ranks_with_different_data_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        train_on(2, make_config(), OtherData, tmp_path)
    for text in caught.value.errors.values():
        assert "ranks differ in the training data: rank 0 (" in text
        assert "start every rank with the same command, packages and data" in text


def test_the_same_job_twice_gives_the_same_bits(tmp_path: Path) -> None:
    config = make_config(dropout=0.2, augment=True)
    for name in ("first", "second"):
        train_on(2, config, Classify, tmp_path / name)
    assert_same_bits(newest(tmp_path / "first"), newest(tmp_path / "second"))


class ReportsAStep(Classify):
    def report(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "step": 1.0}


def test_a_number_that_goes_by_a_name_of_the_events_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the metric name 'step' is reserved") as caught:
        train_here(make_config(epochs=1), ReportsAStep, tmp_path)
    assert "rename the metric; reserved names: communication_share, data_share" in str(caught.value)
