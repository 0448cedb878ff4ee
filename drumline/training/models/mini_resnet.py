"""MiniResNet: a small residual network for small images (8x8 digits, 32x32 CIFAR), with BatchNorm.

A 3x3 stem keeps the size of the image; each stage after the first halves it; then come the mean
over all pixels and one linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.parallel.recompute import is_recomputed, recompute_in_backward


class MiniResNet(nn.Module):
    """`forward(images [N, C, H, W]) -> logits [N, num_classes]`, for images of any size."""

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        blocks: int = 1,
        dropout: float = 0.0,
        activation_checkpointing: bool | str = False,
    ) -> None:
        super().__init__()
        if not widths:
            raise UsageError(
                "mini_resnet has no stages", next_step="set --model.widths, for example 16 32 64"
            )
        self.in_channels = in_channels
        self.activation_checkpointing = activation_checkpointing
        self.stem = _convolution(in_channels, widths[0])
        self.stem_norm = nn.BatchNorm2d(widths[0])
        # With padding, stride 2 rounds up: one pixel stays one pixel.
        self.blocks = nn.ModuleList()
        channels = widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                self.blocks.append(
                    BasicBlock(channels, width, stride=2 if stage > 0 and index == 0 else 1)
                )
                channels = width
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        # Shapes are known on the host, so the check does not wait for the device.
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise UsageError(
                f"mini_resnet takes images of shape [N, {self.in_channels}, H, W], got {list(images.shape)}",
                next_step="check in_channels of the model and the shape of a sample of the dataset",
            )
        features = functional.relu(self.stem_norm(self.stem(images)))
        for number, block in enumerate(self.blocks):
            recompute = self.training and is_recomputed(self.activation_checkpointing, number)
            features = (
                recompute_in_backward(block, features, draws_random=False)
                if recompute
                else block(features)
            )
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape
    changes."""

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = _convolution(in_channels, channels, stride=stride)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = _convolution(channels, channels)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(inputs)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(inputs))


def _convolution(in_channels: int, channels: int, *, stride: int = 1) -> nn.Conv2d:
    # No bias: the BatchNorm that follows would cancel it.
    return nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
    elif isinstance(module, BasicBlock):
        # At the start each block is only its shortcut, so a deep network starts like a shallow one.
        nn.init.zeros_(module.second_norm.weight)
