"""A stream of WebDataset's tar files. Each rank reads its own, and resumes at the very next sample.

drumline train examples/web_dataset.py:Shards --data.dir shards --train.steps 200 --procs 2
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import webdataset as wds
from spirals import Net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from drumline import Loss, Task


def read(paths: list[str], *, buffer: int = 0, seed: int = 0, first: int = 0) -> IterableDataset[Any]:
    """The samples (array, class) of tar files, shuffled in a buffer, from number `first` on."""
    stream = wds.WebDataset(paths, shardshuffle=False, nodesplitter=None).shuffle(buffer, seed=seed)
    # Samples before the first are read, but not decoded. `only`: WebDataset would also load pickles.
    return stream.slice(first, None).decode(only=["npy", "cls"]).to_tuple("npy", "cls").map_tuple(torch.from_numpy)


class OwnShards(IterableDataset[Any]):
    """This rank's tar files, in a new order each round. `state_dict` says what comes next, for a resume."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.round = self.shard = self.sample = 0

    def set_epoch(self, epoch: int) -> None:
        self.round = epoch

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "sample": self.sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shard, self.sample = state["shard"], state["sample"]

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        order = random.Random(self.round).sample(self.paths, len(self.paths))[rank::world_size]  # noqa: S311
        while self.shard < len(order):
            for sample in read([order[self.shard]], buffer=1000, seed=self.round, first=self.sample):
                self.sample += 1
                yield sample
            self.shard, self.sample = self.shard + 1, 0
        self.shard = 0  # a stream that ends starts over


class Shards(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "data.dir": "shards",  # with train-*.tar, at least one for each rank, and eval-*.tar
        "train.batch_size": 64,
        "optim.lr": 0.2,
        "checkpoint.every_steps": 100,
    }
    best_metric, higher_is_better = "accuracy", True

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> OwnShards:
        return OwnShards(sorted(map(str, Path(self.config.data.dir).glob("train-*.tar"))))

    def eval_data(self) -> IterableDataset[Any]:
        return read(sorted(map(str, Path(self.config.data.dir).glob("eval-*.tar"))))  # every rank reads all

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        points, arm = batch
        scores = model(points)
        correct = (scores.argmax(1) == arm).sum()
        return Loss(cross_entropy(scores, arm, reduction="sum"), metrics={"accuracy": correct})
