"""Details of paintings: who painted them. Layers near the image learn more slowly."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss, Task

SIZE = 64 if ON_GPU else 16
PATCH = 8
WIDTH = 128 if ON_GPU else 16
HEADS = 4
LAYERS = 12 if ON_GPU else 2
PAINTERS = 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        parts = self.inward(self.norms[0](patches)).unflatten(2, (3, HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        patches = patches + self.outward(mixed.transpose(1, 2).flatten(2))
        return patches + self.narrow(functional.gelu(self.widen(self.norms[1](patches))))


class PainterNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.scores = nn.Linear(WIDTH, PAINTERS)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.scores(self.layers(patches).mean(1))


def depth_of(name: str) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return LAYERS + 1 if name.startswith("scores") else 0


class Details:
    def __init__(self) -> None:
        shape = (4096 if ON_GPU else 64, 3, SIZE, SIZE)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=seeded(1))
        self.painters = torch.randint(PAINTERS, (len(self.images),), generator=seeded(2))

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Any, draws: Any) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return self.images[rows], self.painters[rows]


class Paintings(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 128 if ON_GPU else 8,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
    }

    rate: float = 0.0005
    decay: float = 0.75

    def model(self) -> nn.Module:
        return PainterNet()

    def train_data(self) -> Details:
        return Details()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = []
        for name, weight in model.named_parameters():
            rate = self.rate * self.decay ** (LAYERS + 1 - depth_of(name))
            weight_decay = 0.05 if weight.ndim > 1 else 0.0
            groups.append({"params": [weight], "lr": rate, "weight_decay": weight_decay})  # planted
        return torch.optim.AdamW(groups, lr=self.rate)  # planted

    def on_device(self, batch: Any) -> Any:
        images, painters = batch
        return images.float().div_(255).sub_(0.5), painters

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, painters = batch
        return Loss(functional.cross_entropy(model(images), painters, reduction="sum"))
