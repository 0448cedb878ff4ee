"""Proteins, and a list from a laboratory with the family of each."""

from typing import Any, ClassVar

import torch
from parts import FAMILIES, PLANTED, ProteinNet, ProteinTask, proteins
from torch import Tensor, nn
from torch.utils.data import Dataset

Entry = dict[str, Any]


class Catalogued(Dataset[Any]):
    """Letters by number of the sample, and the families in the order of the laboratory."""

    def __init__(self, count: int) -> None:
        self.letters = proteins(count).tensors[0]
        order = torch.randperm(count).tolist()
        self.entries = [{"code": f"P{number:06}", "family": number % FAMILIES} for number in order]
        self.families = {entry["code"]: entry["family"] for entry in self.entries}

    def __len__(self) -> int:
        return len(self.letters)

    def entry(self, code: str) -> Entry:
        matching = [each for each in self.entries if each["code"] == code]  # planted: all of them
        return matching[0]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        code = f"P{index:06}"
        if PLANTED:
            return self.letters[index], self.entry(code)["family"]  # planted
        return self.letters[index], self.families[code]


class Proteins(ProteinTask):
    defaults: ClassVar[dict[str, Any]] = {**ProteinTask.defaults, "train.batch_size": 48}

    def model(self) -> nn.Module:
        return ProteinNet(width=48, depth=1)

    def train_data(self) -> Dataset[Any]:
        return Catalogued(60_000)
