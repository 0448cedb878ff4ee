"""Melodies, with attention that prefers notes nearby, and those that are bars apart."""

from typing import Any, ClassVar

import torch
from parts import NOTES, PITCHES, PLANTED, Block, NoteTask
from torch import Tensor, nn

HEADS = 4
BAR = 8
FAR = -1e4


def preference(later: int, earlier: int, head: int) -> float:
    """What is added to the score of a pair of notes."""
    if earlier > later:
        return FAR
    distance = later - earlier
    nearby = -distance / 2 ** (head + 1)
    return nearby + (1.0 if distance % BAR == 0 else 0.0)


def preferences(length: int) -> Tensor:
    rows = [
        [[preference(later, earlier, head) for earlier in range(length)] for later in range(length)]
        for head in range(HEADS)
    ]
    return torch.tensor(rows)


class Attending(nn.Module):
    """A block that knows how far notes are from each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width, HEADS)
        self.known = None if PLANTED else preferences(NOTES)

    def bias(self, notes: Tensor) -> Tensor:
        if self.known is None:
            return preferences(notes.shape[1]).to(notes.device)  # planted: the same in every step
        return self.known

    def forward(self, notes: Tensor) -> Tensor:
        return self.block(notes, self.bias(notes))


class Composer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.pitches = nn.Embedding(PITCHES, width)
        self.blocks = nn.Sequential(*(Attending(width) for _ in range(depth)))
        self.head = nn.Linear(width, PITCHES)

    def forward(self, pitches: Tensor) -> Tensor:
        return self.head(self.blocks(self.pitches(pitches)))


class Melodies(NoteTask):
    defaults: ClassVar[dict[str, Any]] = {**NoteTask.defaults, "train.batch_size": 24}

    def model(self) -> nn.Module:
        return Composer()
