"""Values on a mesh, with messages that are computed node by node."""

import torch
from parts import PLANTED, MeshNet, MeshTask
from torch import Tensor, nn


class NodewiseNet(MeshNet):
    def gathered(self, values: Tensor) -> Tensor:
        means = []
        for around in self.neighbours:
            means.append(values[:, around].mean(1))  # planted: one node at a time
        return torch.stack(means, dim=1)

    def messages(self, values: Tensor) -> Tensor:
        return self.gathered(values) if PLANTED else super().messages(values)  # planted


class Meshes(MeshTask):
    def model(self) -> nn.Module:
        return NodewiseNet()
