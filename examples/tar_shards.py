"""A stream: tar files of samples (WebDataset's shards). Each rank reads its own, and resumes where it was.

drumline train examples/tar_shards.py:Shards --task.folder shards --train.steps 300 --procs 2
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from drumline import Loss, Task


class TarStream(IterableDataset[tuple[Tensor, int]]):
    """KEY.npy and KEY.cls follow each other. `state_dict` says what comes next, so a resume reads nothing twice."""

    def __init__(self, paths: list[Path], *, splits: bool) -> None:
        self.paths, self.splits = paths, splits
        self.shard = self.sample = 0

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "sample": self.sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shard, self.sample = state["shard"], state["sample"]

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        is_split = self.splits and dist.is_initialized()
        own = self.paths[dist.get_rank() :: dist.get_world_size()] if is_split else self.paths
        while self.shard < len(own):
            with tarfile.open(own[self.shard]) as tar:
                files = iter(tar)
                for number, (array, label) in enumerate(zip(files, files, strict=True)):
                    if number == self.sample:  # those before were read before the resume
                        self.sample += 1
                        yield torch.from_numpy(np.load(content(tar, array))), int(content(tar, label).read())
            self.shard, self.sample = self.shard + 1, 0
        self.shard = 0  # a stream that ends starts over


def content(tar: tarfile.TarFile, file: tarfile.TarInfo) -> io.BytesIO:
    opened = tar.extractfile(file)
    return io.BytesIO(opened.read() if opened else b"")


class Shards(Task):
    defaults: ClassVar[dict[str, Any]] = {"train.batch_size": 64, "optim.lr": 0.2, "checkpoint.every_steps": 100}
    best_metric, higher_is_better = "accuracy", True

    folder: str = "shards"
    """The folder with train-*.tar and eval-*.tar; there must be a train-*.tar for each rank."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def train_data(self) -> TarStream:
        return TarStream(sorted(Path(self.folder).glob("train-*.tar")), splits=True)

    def eval_data(self) -> TarStream:
        return TarStream(sorted(Path(self.folder).glob("eval-*.tar")), splits=False)  # every rank reads all

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        points, labels = batch
        scores = model(points)
        correct = (scores.argmax(1) == labels).sum()
        return Loss(cross_entropy(scores, labels, reduction="sum"), metrics={"accuracy": correct})
