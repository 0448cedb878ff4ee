"""Pictures, with an optimizer that whitens every gradient by an eigendecomposition."""

from typing import Any

import torch
from parts import PLANTED, PictureTask
from torch import Tensor, nn

BLOCK = 300


def whitened(gradient: Tensor) -> Tensor:
    rows = gradient.numel() // BLOCK
    blocks = gradient.flatten()[: rows * BLOCK].view(rows, BLOCK).double()
    values, vectors = torch.linalg.eigh(blocks.T @ blocks)  # planted
    scales = (vectors * values.clamp(min=1e-2).rsqrt()) @ vectors.T
    return gradient * scales.diagonal().mean().float()


class Whitened(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if PLANTED and gradient.dim() > 1:
                    gradient = whitened(gradient)  # planted
                parameter.add_(gradient, alpha=-group["lr"])


class Pictures(PictureTask):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Whitened(model.parameters(), lr=0.01)
