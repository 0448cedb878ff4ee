"""Jobs that train on streams: a plain one, the same on every rank, and one of each rank's own that
keeps its place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.jobs import Classify, Everything, Points

Sample = tuple[Tensor, Tensor]


class Plain(IterableDataset[Sample]):
    """Shuffled and augmented by the global generators."""

    def __init__(self, length: int, *, jitter: float) -> None:
        self.points = Points(length, jitter=jitter)

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(len(self.points)))
        random.shuffle(order)
        for index in order:
            yield self.points[index]


class OwnPlace(IterableDataset[Sample]):
    """Every rank reads the points of its own number and so on; how often each was seen is kept
    too."""

    def __init__(self, length: int, *, jitter: float) -> None:
        self.points = Points(length, jitter=jitter)
        self.at = 0
        self.seen: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.seen = state["seen"]

    def __iter__(self) -> Iterator[Sample]:
        rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        rows = range(rank, len(self.points), world_size)
        if self.seen is None:
            # of another size on each rank
            self.seen = torch.zeros(len(rows), dtype=torch.int16)
        while self.at < len(rows):
            self.at += 1
            self.seen[self.at - 1] += 1
            yield self.points[rows[self.at - 1]]
        self.at = 0


class ClassifyStream(Classify):
    """Training and evaluation data are plain streams."""

    def train_data(self) -> Any:
        return Plain(self.config.data.samples, jitter=0.1 if self.config.data.augment else 0.0)

    def eval_data(self) -> Any:
        return Plain(29, jitter=0.0)


class EverythingStream(Everything):
    """The hard network on a plain stream."""

    def train_data(self) -> Any:
        return Plain(self.config.data.samples, jitter=0.1)


class ClassifyOwn(Classify):
    """The training data keeps its own place on each rank."""

    def train_data(self) -> Any:
        return OwnPlace(self.config.data.samples, jitter=0.1 if self.config.data.augment else 0.0)


class _Split(Plain):
    def __iter__(self) -> Iterator[Sample]:
        return (self.points[index] for index in range(dist.get_rank(), 37, dist.get_world_size()))


class SplitsItself(Classify):
    """A plain stream that is wrongly different on each rank."""

    def train_data(self) -> Any:
        return _Split(37, jitter=0.0)


class EvaluatesItsPart(Classify):
    """Every rank has another evaluation set, of another length."""

    def eval_data(self) -> Any:
        return Plain(29 if dist.get_rank() == 0 else 9, jitter=0.0)


class _Same(OwnPlace):
    def __iter__(self) -> Iterator[Sample]:
        return (self.points[index] for index in range(37))


class ForgetsItsRank(Classify):
    """A stream with a state of its own that gives every rank the same."""

    def train_data(self) -> Any:
        return _Same(37, jitter=0.0)


class _Unsaveable(OwnPlace):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


class KeepsASet(Classify):
    """Its state is nothing that a checkpoint can hold."""

    def train_data(self) -> Any:
        return _Unsaveable(37, jitter=0.0)
