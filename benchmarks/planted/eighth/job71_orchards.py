"""Tiles of orchards, seen from a drone: which disease the trees have."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss, Task

SIZE = 64 if ON_GPU else 16
PATCH = 4
PATCHES = (SIZE // PATCH) ** 2
WIDTH = 512 if ON_GPU else 16
BLOCKS = 6 if ON_GPU else 2
DISEASES = 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.across = nn.Linear(PATCHES, PATCHES)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        mixed = self.across(self.norms[0](patches).transpose(1, 2))
        patches = patches + mixed.transpose(1, 2)
        return patches + self.narrow(functional.relu(self.widen(self.norms[1](patches))))


class OrchardNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.diseases = nn.Linear(WIDTH, DISEASES)

    def forward(self, images: Tensor) -> Tensor:
        rows = functional.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2)
        return self.diseases(self.blocks(self.patches(rows)).mean(1))


class Tiles:
    """Each tile comes four times in an epoch."""

    def __init__(self) -> None:
        shape = (16_384 if ON_GPU else 64, 3, SIZE, SIZE)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=seeded(1))
        self.diseases = torch.randint(DISEASES, (len(self.images),), generator=seeded(2))

    def __len__(self) -> int:
        return 4 * len(self.images)

    def batch(self, indices: Any, draws: Any) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices) % len(self.images)
        return self.images[rows], self.diseases[rows]


class Orchards(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 2048 if ON_GPU else 8,
        "train.step": "eager",
        "train.precision": "bf16",
        "train.tf32": "on",
        "dist.bucket_cap_mb": 4,
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.0005,
    }

    def model(self) -> nn.Module:
        return OrchardNet()

    def train_data(self) -> Tiles:
        return Tiles()

    def on_device(self, batch: Any) -> Any:
        images, diseases = batch
        return images.float().div_(255).sub_(0.5), diseases

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, diseases = batch
        return Loss(functional.cross_entropy(model(images), diseases, reduction="sum"))
