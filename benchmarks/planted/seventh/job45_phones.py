"""Frames of speech: which phone is spoken in each of them."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drumline import Loss, Task

FRAMES = 768 if ON_GPU else 64
BANDS = 80
WIDTH = 256 if ON_GPU else 32
HEADS = 8
LAYERS = 6 if ON_GPU else 2
PHONES = 44


def distance_penalty(length: int) -> Tensor:
    """Each head looks less far away than the one before it."""
    places = torch.arange(length)
    distances = (places[:, None] - places[None, :]).abs().float()
    slopes = 2.0 ** -torch.arange(1, HEADS + 1).float()
    return -slopes[:, None, None] * distances  # planted


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, frames: Tensor) -> Tensor:
        samples, length, _ = frames.shape
        parts = self.inward(frames).view(samples, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        penalty = distance_penalty(length).to(frames.device)  # planted
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=penalty)
        return self.outward(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, frames: Tensor) -> Tensor:
        frames = frames + self.attention(self.norms[0](frames))
        return frames + self.inner(self.norms[1](frames))


class Phones(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 16 if ON_GPU else 4,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.0005,
    }

    def model(self) -> nn.Module:
        layers = [Layer() for _ in range(LAYERS)]
        return nn.Sequential(nn.Linear(BANDS, WIDTH), *layers, nn.Linear(WIDTH, PHONES))

    def train_data(self) -> Dataset[Any]:
        count = 700 if ON_GPU else 32
        frames = torch.randn(count, FRAMES, BANDS, generator=seeded(1))
        return TensorDataset(frames, torch.randint(PHONES, (count, FRAMES), generator=seeded(2)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        frames, phones = batch
        scores = model(frames).flatten(0, 1)
        total = functional.cross_entropy(scores, phones.flatten(), reduction="sum")
        return Loss(total, weight=phones.numel())
