"""Spoken commands in a bucket, with one worker for each rank."""

import time
from typing import Any, ClassVar

from parts import PLANTED, SpeechNet, SpeechTask, speech
from torch import Tensor, nn
from torch.utils.data import Dataset


class Bucket:
    """Answers each request after a while, many at once if it is asked."""

    def __init__(self, contents: list[Tensor]) -> None:
        self.contents = contents

    def get(self, key: int) -> Tensor:
        time.sleep(0.008)  # planted: a request over the network
        return self.contents[key]


class Recordings(Dataset[Any]):
    def __init__(self) -> None:
        sounds, self.commands = speech(3072).tensors
        self.bucket = Bucket(list(sounds))

    def __len__(self) -> int:
        return len(self.commands)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.bucket.get(index), self.commands[index]  # planted


class Speech(SpeechTask):
    defaults: ClassVar[dict[str, Any]] = {
        **SpeechTask.defaults,
        "train.batch_size": 64,
        "data.workers": 1 if PLANTED else 4,  # planted
    }

    def model(self) -> nn.Module:
        return SpeechNet(width=72)

    def train_data(self) -> Dataset[Any]:
        return Recordings()
