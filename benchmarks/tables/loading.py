"""From workers to the training process, without a model: what a batch costs on its way.

Each batch is copied once more here, into memory that is used again, as a GPU's pinned memory would
be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness import Taken, Way, measure
from benchmarks.options import Options
from benchmarks.paused_loop import AfterStep
from benchmarks.photos import PhotoBytes, Photos
from benchmarks.report import Goal, Row, Table, ratio
from drumline.data.dataset import BatchMaker, BatchRequest, TwoPartDataset, gather_rows
from drumline.data.delivery import BatchProducer, LoadingOptions
from drumline.training.manager import RunManager

GOAL_BYTES = 2.0
GOAL_SHARED = 1.0
BY_HAND = "DataLoader, float32 samples"
FLOATS = "ours, float32 samples"
BYTES = "ours, uint8 samples"
COPIED = "ours, whole uint8 batches, copied again"
SHARED = "ours, whole uint8 batches"


class Rows(TwoPartDataset):
    """The bytes as whole batches: by `gather_rows`, or in a worker's own memory first."""

    def __init__(self, photos: Photos, *, copies: bool) -> None:
        self._images: NDArray[np.uint8] = photos.images.numpy()
        self._length = len(photos)
        self._copies = copies

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> list[Tensor]:
        chosen = indices % len(self._images)
        return [
            torch.from_numpy(self._images.take(chosen, axis=0))
            if self._copies
            else gather_rows(self._images, chosen)
        ]

    def finish(self, rows: list[Tensor], choices: None) -> list[Tensor]:
        return rows


def make(options: Options, ddp: RunManager) -> Table:
    size, crop, batch_size = (40, 32, 4) if options.tiny else (256, 224, 128)
    workers = 1 if options.tiny else options.workers or 2
    length = batch_size * 100
    settings: dict[str, int] = {
        "size": size,
        "crop": crop,
        "num_images": 8 if options.tiny else 256,
    }
    photos = Photos(length, **settings)
    photo_bytes = PhotoBytes(length, **settings)
    by_hand: DataLoader[Any] = DataLoader(
        photos, batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=True
    )
    our_way = partial(_ours, batch_size=batch_size, workers=workers)
    ways = [
        Way(BY_HAND, partial(_receive, lambda: by_hand)),
        Way(FLOATS, partial(_receive, our_way(photos))),
        Way(BYTES, partial(_receive, our_way(photo_bytes))),
        Way(COPIED, partial(_receive, our_way(Rows(photos, copies=True)))),
        Way(SHARED, partial(_receive, our_way(Rows(photos, copies=False)))),
    ]
    rounds = options.rounds_or(9)
    steps = 8 * workers
    taken = measure(
        [way for way in ways if options.wants(way.name)], rounds=rounds, steps=steps, warm_up=steps
    )
    how = f"n = {rounds} blocks of {steps} batches of {batch_size}, in turn in one process; medians; {workers} workers"
    return _table(taken, size, crop, how)


def _ours(dataset: Any, *, batch_size: int, workers: int) -> Callable[[], Iterator[Any]]:
    def requests() -> Iterator[BatchRequest]:
        for epoch in count():
            for low in range(0, len(dataset), batch_size):
                yield BatchRequest(epoch, low, low + batch_size, shuffled=True)

    # The first part only, as for a GPU.
    maker = BatchMaker(dataset, seed=0, defer_finish=True)
    producer = BatchProducer(maker, LoadingOptions(workers=workers), torch.device("cpu"))
    return lambda: producer.batches(requests())


def _receive(make_batches: Callable[[], Iterable[Any]], after_step: AfterStep) -> None:
    pinned: Tensor | None = None
    while True:
        for first, *_ in make_batches():
            images = first[0] if isinstance(first, list) else first
            pinned = torch.empty_like(images) if pinned is None else pinned
            pinned.copy_(images)
            after_step(len(images))


def _table(taken: list[Taken], size: int, crop: int, how: str) -> Table:
    rows = [Row(way.name, way.per_second(), way.failure) for way in taken]
    title = f"loading: samples of {size}x{size} from memory, as float32 crops of {crop}x{crop} or as they are"
    table = Table("loading", title, "images/s", rows, how)
    goals = [
        Goal(
            "uint8 / float32 samples",
            ratio(table.row(BYTES), table.row(FLOATS)),
            at_least=GOAL_BYTES,
        ),
        Goal(
            "whole batches / copied again",
            ratio(table.row(SHARED), table.row(COPIED)),
            at_least=GOAL_SHARED,
        ),
    ]
    return replace(table, goals=goals)
