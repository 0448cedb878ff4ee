"""Long pieces of genomes: the species that each is of."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drumline import Loss, Task

LENGTH = 4096 if ON_GPU else 64
WIDTH = 256 if ON_GPU else 32
HEADS = 4
LAYERS = 4 if ON_GPU else 2
SPECIES = 20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, values: Tensor) -> Tensor:
        samples, length, _ = values.shape
        parts = self.inward(self.norms[0](values))
        query, key, value = parts.view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        values = values + self.outward(mixed.transpose(1, 2).flatten(2))
        return values + self.inner(self.norms[1](values))


class GenomeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("letters", torch.arange(5, dtype=torch.uint8), persistent=False)
        self.bases = nn.Linear(5, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.scores = nn.Linear(WIDTH, SPECIES)

    def forward(self, bases: Tensor) -> Tensor:
        one_hot = (bases.unsqueeze(2) == self.letters).to(self.bases.weight.dtype)
        values = self.bases(one_hot) + self.places
        return self.scores(self.layers(values).mean(1))


class Genomes(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 64 if ON_GPU else 4,
        "train.precision": "bf16",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.0003,
    }

    def model(self) -> nn.Module:
        return GenomeNet()

    def train_data(self) -> Dataset[Any]:
        count = 4096 if ON_GPU else 32
        bases = torch.randint(5, (count, LENGTH), dtype=torch.uint8, generator=seeded(1))
        return TensorDataset(bases, torch.randint(SPECIES, (count,), generator=seeded(2)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        bases, species = batch
        return Loss(functional.cross_entropy(model(bases), species, reduction="sum"))
