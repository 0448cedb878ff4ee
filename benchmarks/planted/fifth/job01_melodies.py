"""Melodies in a notation for text, of which the dataset makes pitches."""

import random
import re
from typing import Any, ClassVar

import torch
from parts import NOTES, PITCHES, PLANTED, NoteNet, NoteTask
from torch import Tensor, nn
from torch.utils.data import Dataset

NOTE = re.compile(r"(?P<sign>[_^=]*)(?P<letter>[A-Ga-g])(?P<octave>[,']*)(?P<length>\d*/?\d*)")
SEMITONES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}
SHIFTS = {"^": 1, "_": -1, "=": 0}


def tune(seed: int) -> str:
    choose = random.Random(seed)
    notes = []
    for _ in range(4 * NOTES):
        sign, letter = choose.choice(["", "^", "_", "="]), choose.choice("ABCDEFGabcdefg")
        notes.append(sign + letter + choose.choice(["", ",", "'"]) + choose.choice(["", "2", "/2"]))
    return "X:1\nM:4/4\nK:C\n" + " ".join(notes) + " |]"


def pitch(note: re.Match[str]) -> int:
    letter = note["letter"]
    height = 60 + SEMITONES[letter.upper()] + (12 if letter.islower() else 0)
    height += sum(SHIFTS[sign] for sign in note["sign"])
    height += 12 * (note["octave"].count("'") - note["octave"].count(","))
    return height % PITCHES


def parse(text: str) -> Tensor:
    """The pitches of a tune, held for its length."""
    body = re.sub(r"(?m)^[A-Za-z]:.*$", "", text)  # planted
    pitches: list[int] = []
    for note in NOTE.finditer(body):  # planted: all notes of a tune, each time it is read
        pitches += [pitch(note)] * (2 if note["length"] == "2" else 1)
    return torch.tensor(pitches[: NOTES + 1])


class Tunes(Dataset[Any]):
    def __init__(self) -> None:
        self.texts = [tune(seed) for seed in range(768)]
        self.parsed = [] if PLANTED else [parse(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if PLANTED:
            return (parse(self.texts[index]),)  # planted
        return (self.parsed[index],)


class Melodies(NoteTask):
    defaults: ClassVar[dict[str, Any]] = {**NoteTask.defaults, "train.batch_size": 64}

    def model(self) -> nn.Module:
        return NoteNet(width=48, depth=1)

    def train_data(self) -> Dataset[Any]:
        return Tunes()
