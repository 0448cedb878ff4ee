"""A dataset of one's own: ResNet-50 on images that a plain Dataset crops, mirrors and normalises
one by one.

All have the same Dataset in as many workers. Then ours has bytes as samples, and does the rest in
`on_device`. The card alone, with batches that are on it already, is the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.harness import Taken, Way, measure
from benchmarks.options import Options
from benchmarks.photos import CLASSES, PhotoBytes, Photos, prepared
from benchmarks.report import Goal, Row, Table, peer_versions, ratio
from benchmarks.resnet50 import ResNet50
from benchmarks.tables.images import kept
from benchmarks.ways.by_hand import by_hand
from benchmarks.ways.ours import whole_run
from benchmarks.ways.peers import peers
from benchmarks.work import Batch, Endless, Work
from drumline.config.schema import Config, DataConfig, OptimConfig, TrainConfig
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Loss, Task

GOAL_IMAGES = 6_000
GOAL_SHARE = 0.9
NUM_BATCHES = 200
CARD = "the card alone, compiled"
BYTES = "ours, uint8 samples and on_device"


def make(options: Options, ddp: RunManager) -> Table:
    if not options.tiny:
        _compile_for_one_shape()
    size, crop, batch_size = (40, 32, 4) if options.tiny else (256, 224, 256)
    workers = 1 if options.tiny else options.workers or 14
    length = batch_size * NUM_BATCHES
    photos = Photos(length, size=size, crop=crop, num_images=8 if options.tiny else 1024)
    photo_bytes = PhotoBytes(length, size=size, crop=crop, num_images=1)
    photo_bytes.images = photos.images
    config = _config(ddp.device, batch_size, workers)
    tiny = partial(ResNet50, CLASSES, width=4, blocks=(1, 1))
    network = tiny if options.tiny else partial(ResNet50, CLASSES)

    def batches() -> DataLoader[Any]:
        return DataLoader(
            photos,
            batch_size=batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=ddp.device.type == "cuda",
        )

    work = Work(config, {}, ddp.device, kept(batches), network=network)
    compiled = replace(work, is_compiled=not options.tiny, batches=kept(batches))
    on_card = [_on_card(photos, batch_size, ddp.device) for _ in range(4)]
    whole = partial(whole_run, ddp=ddp, config=config, folder=options.folder, samples=length)
    ways = [
        Way("by hand", partial(by_hand, work)),
        Way("by hand, compiled", partial(by_hand, compiled)),
        *(way for way in peers(replace(work, batches=batches)) if way.name == "Accelerate"),
        whole("ours", task=_task(photos, network)),
        whole(BYTES, task=_task(photo_bytes, network)),
        Way(CARD, partial(by_hand, replace(compiled, batches=lambda: Endless(on_card)))),
    ]
    chosen = [way for way in ways if options.wants(way.name)]
    # Workers finish their batches at about the same time: blocks of as many batches as that are
    # alike.
    rounds = options.rounds_or(3)
    steps = 2 * workers
    how = (
        f"n = {rounds} blocks of {steps} steps, in turn in one process under DDP; medians; {workers} workers; "
        f"ours with --train.step {config.train.step}"
    )
    return _table(measure(chosen, rounds=rounds, steps=steps, warm_up=steps), batch_size, crop, how)


def _config(device: torch.device, batch_size: int, workers: int) -> Config:
    is_cuda = device.type == "cuda"
    return Config(
        data=DataConfig(workers=workers),
        optim=OptimConfig(name="sgd", lr=0.1, schedule="constant"),
        train=TrainConfig(
            batch_size=batch_size,
            precision="bf16" if is_cuda else "fp32",
            cudnn_benchmark=is_cuda,
            step="compile" if is_cuda else "eager",
        ),
    )


def _compile_for_one_shape() -> None:
    """Each way has one: the second that is compiled must not make the compiler expect others."""
    import torch._dynamo

    torch._dynamo.config.automatic_dynamic_shapes = False


def _on_card(photos: Photos, batch_size: int, device: torch.device) -> Batch:
    images = torch.randn(batch_size, 3, photos.crop, photos.crop, device=device)
    labels = torch.randint(0, CLASSES, (batch_size,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels


def _task(photos: Photos, network: Callable[[], nn.Module]) -> type[Task]:
    class Classify(Task):
        def model(self) -> nn.Module:
            return network()

        def train_data(self) -> Any:
            return photos

        def on_device(self, batch: list[Tensor]) -> list[Tensor]:
            if len(batch) == 2:
                return batch
            images, chances, labels = batch
            return [prepared(images, chances, photos.crop), labels]

        def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
            images, labels = batch
            return Loss(cross_entropy(model(images), labels, reduction="sum"))

    return Classify


def _table(taken: list[Taken], batch_size: int, crop: int, how: str) -> Table:
    rows = [Row(way.name, way.per_second(), way.failure) for way in taken]
    title = f"resnet: ResNet-50, batch {batch_size}, {crop}x{crop}, from a Dataset with crop, flip and normalisation"
    table = Table("resnet", title, "images/s", rows, how)
    card = table.row(CARD)
    our_row = table.row(BYTES)
    shares = [
        f"{row.way} {row.median / card.median:.0%}"
        for row in rows
        if card and row.values and row is not card
    ]
    goals = [
        Goal(f"{BYTES}, images/s", our_row.median if our_row else None, at_least=GOAL_IMAGES),
        Goal(f"{BYTES} / {CARD}", ratio(our_row, card), at_least=GOAL_SHARE),
    ]
    notes = [f"share of the card: {', '.join(shares)}"] if shares else []
    return replace(table, goals=goals, notes=[*notes, *peer_versions()])
