"""Molecules with lists of bonds, from which the step makes matrices."""

from typing import Any, ClassVar

import torch
from parts import ATOMS, PLANTED, MoleculeTask, molecules
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

BONDS = 40


def matrices(bonds: Tensor) -> Tensor:
    """Which atoms are bound, from the numbers of the two atoms of each bond."""
    result = torch.zeros(len(bonds), ATOMS, ATOMS, device=bonds.device)
    for number, molecule in enumerate(bonds):
        for first, second in molecule:
            result[number, first, second] = 1.0  # planted: one number at a time
            result[number, second, first] = 1.0  # planted
    return result


def matrices_at_once(bonds: Tensor) -> Tensor:
    result = torch.zeros(len(bonds), ATOMS, ATOMS, device=bonds.device)
    numbers = torch.arange(len(bonds), device=bonds.device)[:, None]
    result[numbers, bonds[:, :, 0], bonds[:, :, 1]] = 1.0
    return torch.maximum(result, result.transpose(1, 2))


class Molecules(MoleculeTask):
    defaults: ClassVar[dict[str, Any]] = {**MoleculeTask.defaults, "train.batch_size": 256}

    def train_data(self) -> Dataset[Any]:
        features, _, energies = molecules(6144).tensors
        random = torch.Generator().manual_seed(4)
        bonds = torch.randint(ATOMS, (len(features), BONDS, 2), generator=random)
        return TensorDataset(features, bonds, energies)

    def on_device(self, batch: Any) -> Any:
        features, bonds, energies = batch
        bound = matrices(bonds) if PLANTED else matrices_at_once(bonds)  # planted
        return features, bound, energies
