"""Lines of text, with a small parameter for each pair of a position and a head."""

from typing import Any, ClassVar

import torch
from parts import LINE_LENGTH, PLANTED, LineNet, LineTask
from torch import Tensor, nn

WIDTH = 64
PARTS = 32


class PositionNet(LineNet):
    def __init__(self) -> None:
        super().__init__()
        if PLANTED:
            cells = LINE_LENGTH * PARTS
            self.places = nn.ParameterList(
                torch.zeros(WIDTH // PARTS) for _ in range(cells)
            )  # planted
        else:
            self.places = nn.ParameterList([torch.zeros(LINE_LENGTH * WIDTH)])

    def hidden(self, tokens: Tensor) -> Tensor:
        places = torch.cat(list(self.places)).view(LINE_LENGTH, WIDTH)
        return self.encoder(self.embedding(tokens) + places)


class Lines(LineTask):
    defaults: ClassVar[dict[str, Any]] = {
        **LineTask.defaults,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return PositionNet()
