"""ResNet-50 as torchvision has it (stride in the 3x3 convolution): its model is not installed
everywhere."""

from __future__ import annotations

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and what they are added to."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.body = nn.Sequential(
            *_normed(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(width, outputs, 1),
        )
        has_same_shape = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if has_same_shape else nn.Sequential(*_normed(inputs, outputs, 1, stride))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.relu(self.body(inputs) + self.shortcut(inputs))
        return result


class ResNet50(nn.Module):
    """`width` and `blocks` are for small copies of it."""

    def __init__(
        self, num_classes: int, *, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *_normed(3, width, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = (width << stage) * Bottleneck.expansion
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
