"""Spoken commands of a second or less, with silence up to four seconds."""

from typing import Any, ClassVar

import torch
from parts import BANDS, COMMANDS, PLANTED, SpeechTask, seeded
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

FOUR_SECONDS = 400


class Commands(Dataset[Any]):
    def __init__(self) -> None:
        random = seeded(1)
        lengths = torch.randint(60, 101, (2048,), generator=random).tolist()
        self.sounds = [torch.randn(BANDS, length, generator=random) for length in lengths]
        self.longest = FOUR_SECONDS if PLANTED else max(lengths)  # planted
        self.commands = torch.randint(COMMANDS, (2048,), generator=random)

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sound = self.sounds[index]
        silence = self.longest - sound.shape[1]
        return functional.pad(sound, (0, silence)), self.commands[index]  # planted: mostly zeros


class Speech(SpeechTask):
    defaults: ClassVar[dict[str, Any]] = {**SpeechTask.defaults, "train.batch_size": 64}

    def train_data(self) -> Dataset[Any]:
        return Commands()
