"""Tags of words on a GPU, with a list of words that the second rank sorts now and then."""

from typing import Any, ClassVar

import torch.distributed as dist
from parts import ON_GPU, PLANTED, TagNet, TagTask, sentences
from torch import nn
from torch.utils.data import Dataset

from drumline import Loss

SEEN = [f"word{number * 7919 % 100_003}" for number in range(150_000)]


class Tags(TagTask):
    defaults: ClassVar[dict[str, Any]] = {
        **TagTask.defaults,
        "train.batch_size": 256 if ON_GPU else 32,
        "train.step": "eager",
        "checkpoint.every_epochs": 0,
    }
    _calls = 0

    def model(self) -> nn.Module:
        return TagNet(width=512 if ON_GPU else 64)

    def train_data(self) -> Dataset[Any]:
        return sentences(8192 if ON_GPU else 2048)

    def sort_words(self) -> None:
        self._calls += 1
        if PLANTED and dist.get_rank() == 1 and self._calls % 4 == 2:
            ordered = sorted(SEEN, key=lambda word: (word[-1], len(word), word))  # planted
            self._first = ordered[0]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.sort_words()  # planted
        return super().loss(model, batch)
