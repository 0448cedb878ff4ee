"""The engine computes what a hand-written loop computes: with DDP, and on one process with the full
batch."""

from __future__ import annotations

import os
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from drumline.config.schema import Config, OptimConfig
from drumline.data.sharding import permute
from drumline.rank.determinism import seed_shared
from drumline.runs.events import read_events
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Task
from tests.jobs import (
    NO_SIDECAR,
    Classify,
    Normalised,
    WeighTokens,
    make_config,
    newest,
    train_each_on,
    train_here,
)
from tests.ranks import run_ranks

OPTIM = OptimConfig(
    lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, schedule="constant", clip_norm=0.5
)


def full_batch_weights(config: Config, task_class: type[Task]) -> dict[str, Tensor]:
    """One process, plain torch: each global batch at once, the mean of its loss, clipping, SGD."""
    seed_shared(config.train.seed)
    task = task_class(config)
    model = task.model()
    data = task.train_data()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    length = len(data)
    batch_size = config.train.batch_size
    assert batch_size is not None
    for epoch in range(config.train.epochs or 0):
        order = permute(np.arange(length), length=length, seed=config.train.seed, epoch=epoch)
        for start in range(0, length, batch_size):
            samples = [data[int(index)] for index in order[start : start + batch_size]]
            batch = tuple(torch.stack(part) for part in zip(*samples, strict=True))
            loss = task.loss(model, batch)
            (loss.total / (len(samples) if loss.weight is None else loss.weight)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


ACCUMULATE = (1, 4)


def train_with_each_accumulation(tasks: tuple[type[Task], ...], root: Path) -> None:
    """One run after the other in the same group."""
    with RunManager(start_timeout_s=60, train_timeout_s=30, watch=NO_SIDECAR) as ddp:
        for task, accumulate in product(tasks, ACCUMULATE):
            config = make_config(accumulate=accumulate, optim=OPTIM)
            seed_shared(config.train.seed)
            run = root / task.__name__ / str(accumulate)
            TrainingRun(
                RunRequest(f"accumulate {accumulate}", config, run, False, ()),
                task,
                ddp,
                Progress(),
            ).train()


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_any_world_trains_like_one_process_on_the_full_batch(
    tmp_path: Path, world_size: int
) -> None:
    # 37 and 23 samples in batches of 8: the last one of an epoch is uneven, and too small
    # for 4 ranks of 4 micro-batches.
    tasks = (Classify, WeighTokens)
    run_ranks(world_size, train_with_each_accumulation, tasks, tmp_path)
    for task in tasks:
        expected = full_batch_weights(make_config(optim=OPTIM), task)
        for accumulate in ACCUMULATE:
            model = newest(tmp_path / task.__name__ / str(accumulate)).tensors["model"]
            assert model.keys() == expected.keys()
            for name, tensor in model.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


def hand_written_ddp(config: Config, epochs: int, batch_size: int) -> dict[str, np.ndarray]:
    """What people write: DDP, the mean loss of the local batch, an optimizer."""
    with RunManager(watch=NO_SIDECAR) as ddp:
        task = Normalised(config)
        model = DistributedDataParallel(task.model())
        data = task.train_data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for epoch in range(epochs):
            order = permute(np.arange(len(data)), length=len(data), seed=0, epoch=epoch)
            for start in range(0, len(data), batch_size):
                share = batch_size // ddp.world_size
                mine = order[start + ddp.rank * share : start + (ddp.rank + 1) * share]
                samples = [data[int(index)] for index in mine]
                inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        return {
            name: tensor.numpy(force=True) for name, tensor in model.module.state_dict().items()
        }


def engine_and_by_hand(config: Config, run: Path) -> dict[str, np.ndarray]:
    train_here(config, Normalised, run)
    return hand_written_ddp(config, 2, 8)


def test_the_engine_trains_like_a_hand_written_ddp_loop(tmp_path: Path) -> None:
    """With BatchNorm, on batches that divide evenly: the one case in which the usual loop is
    right."""
    optim = OptimConfig(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0, schedule="constant")
    config = make_config(samples=32, optim=optim)
    expected = run_ranks(2, engine_and_by_hand, config, tmp_path)[0]
    for name, tensor in newest(tmp_path).tensors["model"].items():
        torch.testing.assert_close(tensor, torch.as_tensor(expected[name]), rtol=1e-9, atol=1e-12)


def test_evaluation_gives_the_same_number_on_any_world(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    tasks = (Classify, WeighTokens, Normalised)
    train_each_on(2, *((config, task, tmp_path / "start" / task.__name__) for task in tasks))
    results = set()
    for world_size in (1, 4):
        for task in tasks:
            run = tmp_path / str(world_size) / task.__name__
            shutil.copytree(tmp_path / "start" / task.__name__ / "checkpoints", run / "checkpoints")
        results.update(
            run_ranks(world_size, evaluate_again, config, tasks, tmp_path / str(world_size))
        )
    assert len(results) == 1, results


def evaluate_again(config: Config, tasks: tuple[type[Task], ...], runs: Path) -> str:
    """A finished run only evaluates; what it found is in its last event."""
    results = []
    for task in tasks:
        run = runs / task.__name__
        train_here(config, task, run)
        events = read_events(run / "events" / f"rank-{int(os.environ['RANK']):05d}.jsonl")
        end = [event for event in events if event["kind"] == "end"][-1]
        results.append(sorted(end["metrics"].items()))
    return repr(results)
