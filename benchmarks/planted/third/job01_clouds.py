"""Point clouds that are kept packed in memory, with more points than the network gets."""

import bz2
from typing import Any

import torch
from parts import PLANTED, POINTS, CloudTask, clouds
from torch import Tensor
from torch.utils.data import Dataset

SCANNED = 4096
SCANS = 128


def unpacked(packed: bytes) -> Tensor:
    values = bytearray(bz2.decompress(packed))  # planted: for each sample
    return torch.frombuffer(values, dtype=torch.float32).view(SCANNED, 3)


class ScannerClouds(Dataset[Any]):
    def __init__(self) -> None:
        places, self.shapes = clouds(SCANS, points=SCANNED).tensors
        if PLANTED:
            self.packed = [bz2.compress(cloud.numpy().tobytes()) for cloud in places]
        self.places = places[:, :POINTS].clone()

    def __len__(self) -> int:
        return 8192

    def thinned(self, number: int) -> Tensor:
        if PLANTED:
            return unpacked(self.packed[number])[:POINTS]  # planted
        return self.places[number]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = index % SCANS
        return self.thinned(number), self.shapes[number]  # planted


class Clouds(CloudTask):
    def train_data(self) -> Dataset[Any]:
        return ScannerClouds()
