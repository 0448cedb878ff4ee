"""From bytes in memory to weights: a larger MiniResNet on as many images as CIFAR-10 has, shuffled,
cropped, mirrored and normalised.

The others have the usual Dataset that makes one sample at a time, in the workers of a DataLoader.
Ours reads the same images as `--data.name cifar10`, and is a whole run with events, ledger and
exact sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Taken, Way, measure
from benchmarks.options import Options
from benchmarks.report import Goal, Row, Table, peer_versions, ratio
from benchmarks.ways.by_hand import by_hand
from benchmarks.ways.ours import steps_of, whole_run
from benchmarks.ways.peers import peers
from benchmarks.work import Work
from drumline.config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from drumline.training.manager import RunManager
from drumline.training.tasks import load_task

GOAL_IMAGES = 95_000
GOAL_LIGHTNING = 2.3
GOAL_ACCELERATE = 1.8
PADDING = 4
# Epochs enough for the short batch at their end to be compiled and captured too.
OURS_WARM_UP = 450
MEAN = torch.tensor((125.3, 123.0, 113.9))
STD = torch.tensor((63.0, 62.1, 66.7))
Loader = DataLoader[tuple[Tensor, int]]
RESIDENT = "ours, data on the device"
ON_HOST = "ours, data on the host"


class Samples(Dataset[tuple[Tensor, int]]):
    """One image at a time, as people write it."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.images = torch.from_numpy(images)
        self.labels = labels
        self.mean = MEAN.view(3, 1, 1)
        self.std = STD.view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = functional.pad(self.images[index], (PADDING,) * 4)
        down, right = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
        image = padded[:, down : down + 32, right : right + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image.float() - self.mean) / self.std, int(self.labels[index])


def make(options: Options, ddp: RunManager) -> Table:
    folder = options.folder
    count, size = (160, 16) if options.tiny else (50_000, 512)
    images, labels = write_cifar10(folder / "data", count)
    config = _config(options, ddp.device, folder / "data", size)
    workers = 1 if options.tiny else options.workers or 12

    def batches() -> Loader:
        return DataLoader(
            Samples(images, labels),
            batch_size=size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=4,
            pin_memory=ddp.device.type == "cuda",
        )

    work = Work(config, {"in_channels": 3, "num_classes": 10}, ddp.device, kept(batches))
    compiled = replace(work, is_compiled=not options.tiny, batches=kept(batches))
    ways = [
        Way("by hand", partial(by_hand, work)),
        Way("by hand, compiled", partial(by_hand, compiled)),
        *peers(replace(work, batches=batches)),
        *_ours(ddp, config, folder, count, warm_up=5 if options.tiny else OURS_WARM_UP),
    ]
    chosen = [way for way in ways if options.wants(way.name)]
    rounds = options.rounds_or(7)
    steps = count // size
    how = (
        f"n = {rounds} blocks of {steps} steps, in turn in one process under DDP; medians; all but ours "
        f"with a DataLoader of {workers} workers"
    )
    taken = measure(chosen, rounds=rounds, steps=steps, warm_up=5 if options.tiny else 120)
    return _table(taken, "tiny" if options.tiny else "64-128-256 x2", size, how)


def kept(make_loader: Callable[[], Loader]) -> Callable[[], Loader]:
    """The same loader in every epoch: its workers persist."""
    held: list[Loader] = []

    def loader() -> Loader:
        if not held:
            held.append(make_loader())
        return held[0]

    return loader


def _ours(ddp: RunManager, config: Config, folder: Path, count: int, *, warm_up: int) -> list[Way]:
    kind = "compiled_graph" if ddp.device.type == "cuda" else "eager"
    config = steps_of(config, kind)
    task = load_task("cifar10")
    resident = replace(config, data=replace(config.data, resident=ddp.device.type == "cuda"))
    return [
        whole_run(ON_HOST, ddp, config, task, folder, samples=count, warm_up=warm_up),
        whole_run(RESIDENT, ddp, resident, task, folder, samples=count, warm_up=warm_up),
    ]


def _config(options: Options, device: torch.device, folder: Path, size: int) -> Config:
    is_cuda = device.type == "cuda"
    return Config(
        model=ModelConfig(widths=(4, 8), blocks=1)
        if options.tiny
        else ModelConfig(widths=(64, 128, 256), blocks=2),
        data=DataConfig(name="cifar10", dir=str(folder), augment=True),
        optim=OptimConfig(name="sgd", lr=0.1, schedule="constant"),
        train=TrainConfig(
            batch_size=size, precision="bf16" if is_cuda else "fp32", cudnn_benchmark=is_cuda
        ),
    )


def write_cifar10(folder: Path, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Random images in the files of CIFAR-10's binary version; returns the training part."""
    folder.mkdir()
    random = np.random.default_rng(0)
    parts = []
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records = random.integers(0, 256, (count // 5, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
        parts.append(records)
    whole = np.concatenate(parts[:-1])
    return np.ascontiguousarray(whole[:, 1:]).reshape(-1, 3, 32, 32), whole[:, 0].copy()


def _table(taken: list[Taken], model: str, size: int, how: str) -> Table:
    rows = [Row(way.name, way.per_second(), way.failure) for way in taken]
    title = f"images: MiniResNet {model}, batch {size}, from uint8 images in memory with crop, flip and shuffling"
    table = Table("images", title, "images/s", rows, how)
    our_row = table.row(RESIDENT)
    goals = [
        Goal("ours, images/s", our_row.median if our_row else None, at_least=GOAL_IMAGES),
        Goal("ours / Lightning", ratio(our_row, table.row("Lightning")), at_least=GOAL_LIGHTNING),
        Goal(
            "ours / Accelerate", ratio(our_row, table.row("Accelerate")), at_least=GOAL_ACCELERATE
        ),
    ]
    return replace(table, goals=goals, notes=peer_versions())
