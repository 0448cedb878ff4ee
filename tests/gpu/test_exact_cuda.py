"""The same bits on a GPU: `--train.deterministic` after a kill, `--train.exact elastic` on any
number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from drumline.data.loader import Step
from drumline.training.job.job import Progress, build_job
from drumline.training.loop import Loop
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.steps.choice import make_step
from drumline.training.tasks.built_in import load_task
from tests.jobs import assert_same_bits, newest
from tests.ranks import RanksFailed, run_ranks
from tests.schedules import digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(
    name: str, *, precision: str = "fp32", backend: str = "auto", steps: int = 9, **settings: Any
) -> Config:
    models = {
        "digits": ModelConfig(name="mini_resnet", widths=(16, 32), dropout=0.2),
        "text": ModelConfig(name="gpt", layers=2, width=64, heads=4, context=64, dropout=0.2),
    }
    return Config(
        model=models[name],
        data=DataConfig(
            name={"digits": "digits", "text": "tokens"}[name], augment=name == "digits"
        ),
        optim=OptimConfig(name="adamw", lr=1e-3, clip_norm=1.0, schedule="cosine"),
        train=TrainConfig(
            steps=steps, batch_size=32, precision=precision, deterministic=True, **settings
        ),
        dist=DistConfig(backend=backend),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=10),
        log=LogConfig(every_steps=4, display="none"),
    )


def train_one(
    name: str, config: Config, run: Path, *, die_in_step: int | None = None
) -> str | None:
    """Train as a rank whose GPU is number 0, as if every rank had a machine of its own."""
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if die_in_step is not None:
        take_step = Loop.take_step

        def die(self: Loop, step: Step) -> None:
            take_step(self, step)
            if self.progress.step == die_in_step:
                os.kill(os.getpid(), signal.SIGKILL)

        Loop.take_step = die  # type: ignore[method-assign]
    task = load_task(name)
    ddp = RunManager(seed=0, backend=config.dist.backend, deterministic=config.train.deterministic)
    ddp.setup()
    try:
        TrainingRun(RunRequest(name, config, run, False, (name,)), task, ddp, Progress()).train()
        return ddp.backend
    finally:
        ddp.cleanup()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, name: str, precision: str) -> None:
    config = make(name, precision=precision, accumulate=2)
    run_ranks(1, train_one, name, config, tmp_path / "whole")
    with pytest.raises(RanksFailed, match="ended without a word"):
        run_ranks(1, kill_one, name, config, tmp_path / "killed")
    run_ranks(1, train_one, name, config, tmp_path / "killed")
    assert_same_bits(newest(tmp_path / "whole"), newest(tmp_path / "killed"))


def kill_one(name: str, config: Config, run: Path) -> None:
    train_one(name, config, run, die_in_step=5)


def elastic_steps_without_waiting(name: str, precision: str) -> int:
    """Takes steps while torch raises at any synchronisation with the device; the first may wait, to
    set things up."""
    config = make(name, precision=precision, exact="elastic", shards=4, steps=100)
    with RunManager(deterministic=True) as ddp:
        job = build_job(config, load_task(name)(config), ddp)
        take_step = make_step(job, config)
        steps = job.loader.steps()
        for _ in range(2):
            take_step(next(steps))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for count, step in enumerate(steps, 1):
                take_step(step)
                if count == 8:
                    return count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    raise AssertionError("too few steps")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_an_elastic_step_does_not_wait_for_the_device(name: str, precision: str) -> None:
    assert run_ranks(1, elastic_steps_without_waiting, name, precision) == [8]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["digits", "text"])
def test_elastic_is_bit_identical_on_one_two_and_three_ranks(
    tmp_path: Path, name: str, precision: str
) -> None:
    """NCCL does not let ranks share a GPU, so several of them talk through gloo here."""
    config = make(
        name, precision=precision, exact="elastic", shards=4, accumulate=2, backend="gloo", steps=5
    )
    digests = {}
    for world_size in (1, 2, 3):
        run = tmp_path / str(world_size)
        run_ranks(world_size, train_one, name, config, run)
        digests[f"{world_size} over gloo"] = digest(run)
    nccl = make(
        name, precision=precision, exact="elastic", shards=4, accumulate=2, backend="nccl", steps=5
    )
    assert run_ranks(1, train_one, name, nccl, tmp_path / "nccl") == ["nccl"]
    digests["1 over nccl"] = digest(tmp_path / "nccl")
    assert len(set(digests.values())) == 1, digests
