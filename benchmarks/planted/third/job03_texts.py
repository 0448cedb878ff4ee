"""A small GPT on a stream of texts; each rank reads files of its own, which were cut by hand."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, TOKENS, TextTask, seeded
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

CUT = 32
UNCUT = 120


class Part(IterableDataset[Any]):
    """The texts in the files of a rank. The second half of the files was never cut."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def length(self) -> int:
        if PLANTED:
            return UNCUT if dist.get_rank() == 1 else CUT  # planted: a half for each rank
        return CUT

    def __iter__(self) -> Iterator[Tensor]:
        while self.count < 8192:
            length = self.length()
            random = seeded(2 * self.count + dist.get_rank())
            self.count += 1
            yield torch.randint(TOKENS, (length + 1,), generator=random)
        self.count = 0


class Texts(TextTask):
    def train_data(self) -> Dataset[Any]:
        return Part()

    @staticmethod
    def collate(samples: list[Tensor]) -> tuple[Tensor]:
        return (torch.stack(samples),)
