"""Pictures on a GPU, with numbers of every layer read by the host in every step."""

from typing import Any, ClassVar

from parts import PLANTED, PictureTask
from torch import Tensor, nn

LAYERS = 24


class DeepNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(LAYERS))
        self.scores = nn.Linear(64, 10)
        self.largest = 0.0

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images)
        for layer in self.layers:
            maps = maps + layer(maps).relu()
            if PLANTED:
                self.largest = max(self.largest, maps.detach().abs().max().item())  # planted
        return self.scores(maps.mean((2, 3)))


class Pictures(PictureTask):
    # 24 layers without a norm do not bear a larger rate.
    defaults: ClassVar[dict[str, Any]] = {
        **PictureTask.defaults,
        "train.step": "eager",
        "optim.lr": 1e-6,
    }

    def model(self) -> nn.Module:
        return DeepNet()
