"""Pictures, with a gate that the network computes from lists of numbers."""

import math

import torch
from parts import PLANTED, PictureNet, PictureTask
from torch import Tensor, nn
from torch.nn import functional


def energy(maps: Tensor) -> Tensor:
    energies = []
    for values in maps.flatten(1).tolist():  # planted: numbers one by one
        mean = sum(values) / len(values)  # planted
        energies.append(sum(math.tanh((value - mean) ** 2) for value in values))  # planted
    return torch.tensor(energies, device=maps.device) / len(values)


class GatedNet(PictureNet):
    def forward(self, images: Tensor) -> Tensor:
        maps = functional.max_pool2d(functional.relu(self.first(images)), 2)
        if PLANTED:
            maps = maps * energy(maps.detach()).view(-1, 1, 1, 1)
        maps = functional.max_pool2d(functional.relu(self.second(maps)), 2)
        return self.scores(maps.flatten(1))


class Pictures(PictureTask):
    def model(self) -> nn.Module:
        return GatedNet()
