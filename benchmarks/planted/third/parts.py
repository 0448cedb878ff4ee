"""What the jobs of this folder share: six kinds of data in memory, their networks and tasks.

With PLANTED=off in the environment a job runs without its bottleneck.
"""

import math
import os
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from drumline import Loss, Task

PLANTED = os.environ.get("PLANTED", "on") == "on"
STEPS = int(os.environ.get("STEPS", "60"))

CHANNELS = 8
PAST = 128
FUTURE = 12
ITEMS = 1500
BASKET = 20
TOKENS = 256
CONTEXT = 64
POINTS = 256
SHAPES = 10
FEATURES = 128


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def series(count: int, past: int = PAST, seed: int = 1) -> TensorDataset:
    """Windows of measured values of several channels, and the values that follow."""
    random = seeded(seed)
    times = torch.arange(past + FUTURE) / 24
    phases = 2 * math.pi * torch.rand(count, CHANNELS, 1, generator=random)
    values = torch.sin(2 * math.pi * times + phases)
    values += 0.3 * torch.randn(values.shape, generator=random)
    return TensorDataset(values[:, :, :past].contiguous(), values[:, :, past:].contiguous())


def baskets(count: int, items: int = ITEMS, seed: int = 1) -> TensorDataset:
    """What lies in a basket, an item that is offered, and whether it is bought."""
    random = seeded(seed)
    chosen = torch.randint(items, (count, BASKET), generator=random)
    offered = torch.randint(items, (count,), generator=random)
    return TensorDataset(chosen, offered, torch.rand(count, generator=random).round())


def texts(count: int, length: int = CONTEXT, seed: int = 1) -> TensorDataset:
    return TensorDataset(torch.randint(TOKENS, (count, length + 1), generator=seeded(seed)))


def clouds(count: int, points: int = POINTS, seed: int = 1) -> TensorDataset:
    """Points on the surface of a shape, and the number of the shape."""
    random = seeded(seed)
    places = torch.randn(count, points, 3, generator=random)
    return TensorDataset(places, torch.randint(SHAPES, (count,), generator=random))


def patches(count: int, size: int = 32, seed: int = 1) -> TensorDataset:
    """Smooth grey patches, without noise."""
    coarse = torch.randn(count, 1, size // 4, size // 4, generator=seeded(seed))
    return TensorDataset(functional.interpolate(coarse, scale_factor=4, mode="bilinear"))


def pairs(count: int, seed: int = 1) -> TensorDataset:
    """Two views of the same thing."""
    random = seeded(seed)
    things = torch.randn(count, FEATURES, generator=random)
    first = things + 0.5 * torch.randn(things.shape, generator=random)
    return TensorDataset(first, things + 0.5 * torch.randn(things.shape, generator=random))


class SeriesNet(nn.Module):
    """Dilated convolutions over time."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(CHANNELS, width, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**layer, dilation=2**layer)
            for layer in range(depth)
        )
        self.last = nn.Linear(width, CHANNELS * FUTURE)

    def forward(self, past: Tensor) -> Tensor:
        values = self.first(past)
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.last(values.mean(2)).view(-1, CHANNELS, FUTURE)


class BasketNet(nn.Module):
    """A tower for the basket and one for the offered item."""

    def __init__(self, items: int = ITEMS, width: int = 32, hidden: int = 512) -> None:
        super().__init__()
        self.basket = nn.EmbeddingBag(items, width, mode="mean")
        self.offer = nn.Embedding(items, width)
        self.layers = nn.Sequential(
            nn.Linear(2 * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, chosen: Tensor, offered: Tensor) -> Tensor:
        known = torch.cat([self.basket(chosen), self.offer(offered)], dim=1)
        return self.layers(known)[:, 0]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    def forward(self, hidden: Tensor) -> Tensor:
        size = hidden.shape[-1] // self.heads
        parts = self.inputs(hidden).unflatten(2, (3, self.heads, size)).permute(2, 0, 3, 1, 4)
        mixed = self.attended(parts[0], parts[1], parts[2])
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden))
        return hidden + self.layers(self.norms[1](hidden))


class GptNet(nn.Module):
    def __init__(self, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.zeros(2 * CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.scores = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.scores(hidden)


class CloudNet(nn.Module):
    """The same layers for each point, then the maximum over all points."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Linear(3, width),
            nn.ReLU(),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 4 * width),
        )
        self.scores = nn.Linear(4 * width, SHAPES)

    def forward(self, places: Tensor) -> Tensor:
        return self.scores(self.points(places).amax(1))


class DenoiseNet(nn.Module):
    """Predicts the noise of a patch."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, noisy: Tensor) -> Tensor:
        return noisy - self.layers(noisy)


class PairNet(nn.Module):
    """A direction for each view."""

    def __init__(self, hidden: int = 512, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, views: Tensor) -> Tensor:
        return functional.normalize(self.layers(views), dim=-1)


def text_loss(scores: Tensor, tokens: Tensor, reduction: str = "mean") -> Tensor:
    targets = tokens[:, 1:].flatten()
    return functional.cross_entropy(scores.flatten(0, 1), targets, reduction=reduction)


def pair_loss(first: Tensor, second: Tensor, reduction: str = "mean") -> Tensor:
    """Each first view has to choose its second view among those of the batch."""
    targets = torch.arange(len(first), device=first.device)
    return functional.cross_entropy(first @ second.T / 0.1, targets, reduction=reduction)


class SeriesTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 64,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return SeriesNet()

    def train_data(self) -> Dataset[Any]:
        return series(6144)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        past, future = batch
        total = functional.mse_loss(model(past), future, reduction="sum")
        return Loss(total, weight=future.numel())


class BasketTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 512,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return BasketNet()

    def train_data(self) -> Dataset[Any]:
        return baskets(40_960)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        chosen, offered, bought = batch
        scores = model(chosen, offered)
        return Loss(functional.binary_cross_entropy_with_logits(scores, bought, reduction="sum"))


class TextTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 16,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return GptNet()

    def train_data(self) -> Dataset[Any]:
        return texts(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens = batch[0]
        scores = model(tokens[:, :-1])
        return Loss(text_loss(scores, tokens, "sum"), weight=tokens[:, 1:].numel())


class CloudTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return CloudNet()

    def train_data(self) -> Dataset[Any]:
        return clouds(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        places, shapes = batch
        return Loss(functional.cross_entropy(model(places), shapes, reduction="sum"))


class DenoiseTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return DenoiseNet()

    def train_data(self) -> Dataset[Any]:
        return patches(4096)

    def on_device(self, batch: Any) -> Any:
        clean = batch[0]
        return clean + 0.3 * torch.randn_like(clean), clean

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        noisy, clean = batch
        total = functional.mse_loss(model(noisy), clean, reduction="sum")
        return Loss(total, weight=clean.numel())


class PairTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 256,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return PairNet()

    def train_data(self) -> Dataset[Any]:
        return pairs(20_480)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        first, second = batch
        return Loss(pair_loss(model(first), model(second), "sum"), weight=len(first))


def start() -> torch.device:
    """Collective: joins the process group, and returns the device of this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return torch.device("cpu")


def batches(data: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    """Batches of this rank; the size is that of one rank."""
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=True, **options)


def now() -> float:
    return time.perf_counter()


def finish(steps: int, seconds: float) -> None:
    """Collective: prints the time of the loop on rank 0, and leaves the group."""
    report(steps, seconds)
    dist.barrier()
    dist.destroy_process_group()


def report(steps: int, seconds: float) -> None:
    if dist.get_rank() == 0:
        print(f"done: {steps} steps in {seconds:.3f} s", flush=True)
