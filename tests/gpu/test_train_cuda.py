"""The pipeline on a GPU: NCCL, autocast, loss scaling, SyncBatchNorm, and steps that do not wait
for the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.checkpoint import store
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
)
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.job.job import Progress, build_job
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks import ImageClassification
from tests.jobs import assert_same_bits, newest
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def digits(precision: str, *, steps: int = 12, backend: str = "auto", **settings: Any) -> Config:
    return Config(
        data=DataConfig(name="digits", augment=True),
        optim=OptimConfig(lr=0.05, clip_norm=1.0, schedule="cosine"),
        train=TrainConfig(steps=steps, batch_size=32, precision=precision, **settings),
        dist=DistConfig(backend=backend),
        checkpoint=CheckpointConfig(every_steps=4, keep_last=10),
        log=LogConfig(every_steps=4, display="none"),
    )


def train_on_gpu(config: Config, run: Path, stop_at: int | None = None) -> str | None:
    torch.use_deterministic_algorithms(True)
    ddp = RunManager(seed=config.train.seed, backend=config.dist.backend)
    ddp.setup()
    try:
        if stop_at is not None:
            for later in [
                step for step in catalog.list_steps(run / "checkpoints") if step > stop_at
            ]:
                store.remove(run / "checkpoints" / catalog.folder_name(later))
        TrainingRun(
            RunRequest("digits", config, run, False, ("digits",)),
            ImageClassification,
            ddp,
            Progress(),
        ).train()
        return ddp.backend
    finally:
        ddp.cleanup()


def setup_module() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def teardown_module() -> None:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_over_nccl_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    config = digits(precision)
    assert run_ranks(1, train_on_gpu, config, tmp_path / "whole") == ["nccl"]
    run_ranks(1, train_on_gpu, config, tmp_path / "resumed")
    # Forget the later half of the run, and do it again from the checkpoint in the middle.
    run_ranks(1, train_on_gpu, config, tmp_path / "resumed", 4)
    whole = newest(tmp_path / "whole")
    resumed = newest(tmp_path / "resumed")
    assert_same_bits(whole, resumed)
    assert ("scaler" in whole.documents) == (precision == "fp16")
    losses = [
        e["loss"]
        for e in read_events(tmp_path / "whole" / "events" / "rank-00000.jsonl")
        if e["kind"] == "train"
    ]
    assert losses[-1] < losses[0]


def test_precisions_agree_on_the_loss(tmp_path: Path) -> None:
    finals = {}
    for precision in ("fp32", "bf16", "fp16"):
        run_ranks(1, train_on_gpu, digits(precision), tmp_path / precision)
        events = read_events(tmp_path / precision / "events" / "rank-00000.jsonl")
        finals[precision] = [event["loss"] for event in events if event["kind"] == "train"][-1]
    assert finals["bf16"] == pytest.approx(finals["fp32"], rel=0.1)
    assert finals["fp16"] == pytest.approx(finals["fp32"], rel=0.1)


def steps_without_waiting(precision: str) -> int:
    """Takes steps while torch raises at any synchronisation with the device."""
    config = digits(precision, steps=100)
    with RunManager() as ddp:
        job = build_job(config, ImageClassification(config), ddp)
        train_step = TrainStep(job, clip_norm=1.0)
        taken = 0
        for step in job.loader.steps():
            if taken == 3:
                torch.cuda.set_sync_debug_mode("error")
            train_step(step)
            taken += 1
            if taken == 10:
                break
        torch.cuda.set_sync_debug_mode("default")
        return taken


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_that_does_not_log_never_waits_for_the_device(precision: str) -> None:
    assert run_ranks(1, steps_without_waiting, precision) == [10]


def normalise(share: list[int]) -> list[float]:
    """Batch statistics of a model under SyncBatchNorm, on two ranks that share one GPU over
    gloo."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    with RunManager(backend="gloo") as ddp:
        model = ddp.wrap(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), sync_batchnorm=True)
        rows = torch.arange(12.0).reshape(6, 2)
        own_rows = rows[: share[0]] if rank == 0 else rows[share[0] :]
        model(own_rows.to(ddp.device)).sum().backward()
        return [float(x) for x in model.module[0].running_mean]  # type: ignore[index,union-attr]


def test_sync_batchnorm_sees_the_batches_of_all_ranks() -> None:
    expected = (torch.arange(12.0).reshape(6, 2).mean(0) * 0.1).tolist()
    for means in run_ranks(2, normalise, [4, 2]):
        assert means == pytest.approx(expected)


def test_a_gpu_run_continues_on_the_cpu(tmp_path: Path) -> None:
    config = digits("fp32")
    run_ranks(1, train_on_gpu, config, tmp_path)
    longer = Config(**{**vars(digits("fp32", steps=16)), "dist": DistConfig(device="cpu")})
    assert run_ranks(1, train_on_cpu, longer, tmp_path) == [16]


def train_on_cpu(config: Config, run: Path) -> int:
    progress = Progress()
    with RunManager(device="cpu") as ddp:
        TrainingRun(
            RunRequest("digits", config, run, False, ("digits",)),
            ImageClassification,
            ddp,
            progress,
        ).train()
    return progress.step
