"""Molecules with energies that need many digits, and a network with as many."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, MoleculeNet, MoleculeTask, molecules
from torch import nn
from torch.utils.data import Dataset, TensorDataset

KIND = torch.float64 if PLANTED else torch.float32  # planted


class Molecules(MoleculeTask):
    defaults: ClassVar[dict[str, Any]] = {**MoleculeTask.defaults, "train.batch_size": 384}

    def model(self) -> nn.Module:
        return MoleculeNet().to(KIND)  # planted: weights, too

    def train_data(self) -> Dataset[Any]:
        features, bonds, energies = molecules(8192).tensors
        return TensorDataset(features.to(KIND), bonds.to(KIND), energies.to(KIND))  # planted
