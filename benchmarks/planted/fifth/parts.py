"""What the jobs of this folder share: five kinds of data in memory, their networks and tasks.

With PLANTED=off in the environment a job runs without its bottleneck.
"""

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

TOKENS = 1000
TICKET_LENGTH = 48
DEPARTMENTS = 8
PITCHES = 128
NOTES = 64
CELL_SIZE = 48
CHANNELS = 6
WINDOW = 96
FAULTS = 10
USERS = 3000
FILMS = 1000


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tickets(count: int, length: int = TICKET_LENGTH, seed: int = 1) -> TensorDataset:
    """Tokens of messages to a help desk, and the departments that answer them."""
    random = seeded(seed)
    tokens = torch.randint(1, TOKENS, (count, length), generator=random)
    return TensorDataset(tokens, torch.randint(DEPARTMENTS, (count,), generator=random))


def melodies(count: int, length: int = NOTES, seed: int = 1) -> TensorDataset:
    """Pitches of melodies, one more than the network reads."""
    return TensorDataset(torch.randint(PITCHES, (count, length + 1), generator=seeded(seed)))


def cells(count: int, size: int = CELL_SIZE, seed: int = 1) -> TensorDataset:
    """Grey pictures from a microscope, and which pixels are cells."""
    random = seeded(seed)
    pictures = torch.rand(count, 1, size, size, generator=random)
    smooth = functional.avg_pool2d(pictures, 5, stride=1, padding=2)
    return TensorDataset(pictures, (smooth > 0.5).float())


def vibrations(count: int, window: int = WINDOW, seed: int = 1) -> TensorDataset:
    """Windows of six sensors on a machine, and the machine's fault."""
    random = seeded(seed)
    windows = torch.randn(count, CHANNELS, window, generator=random)
    return TensorDataset(windows, torch.randint(FAULTS, (count,), generator=random))


def ratings(count: int, users: int = USERS, films: int = FILMS, seed: int = 1) -> TensorDataset:
    """Who has seen which film, and whether they liked it."""
    random = seeded(seed)
    viewers = torch.randint(users, (count,), generator=random)
    seen = torch.randint(films, (count,), generator=random)
    return TensorDataset(viewers, seen, torch.rand(count, generator=random).round())


class Block(nn.Module):
    """Attention and two linear layers, each beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
        parts = self.inputs(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, is_causal=causal
        )
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


class TicketNet(nn.Module):
    """A small encoder, then the mean over the tokens."""

    def __init__(
        self, width: int = 96, depth: int = 2, heads: int = 4, tokens: int = TOKENS
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, DEPARTMENTS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class NoteNet(nn.Module):
    """A small causal transformer over pitches."""

    def __init__(self, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.pitches = nn.Embedding(PITCHES, width)
        self.places = nn.Parameter(0.02 * torch.randn(NOTES, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, PITCHES)

    def forward(self, pitches: Tensor) -> Tensor:
        hidden = self.pitches(pitches) + self.places[: pitches.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, causal=True)
        return self.head(hidden)


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())


class CellNet(nn.Module):
    """A U-Net with two levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fine = convolution(1, width)
        self.coarse = nn.Sequential(
            convolution(width, 2 * width), convolution(2 * width, 2 * width)
        )
        self.joined = convolution(3 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.fine(pictures)
        coarse = self.coarse(functional.max_pool2d(fine, 2))
        coarse = functional.interpolate(coarse, scale_factor=2)
        return self.last(self.joined(torch.cat([fine, coarse], dim=1)))[:, 0]


class SensorNet(nn.Module):
    """Convolutions over time, then the mean over it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(CHANNELS, width, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, FAULTS)

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.layers(windows).mean(2))


class RatingNet(nn.Module):
    """Embeddings of the viewer and of the film, then wide layers."""

    def __init__(
        self,
        users: int = USERS,
        films: int = FILMS,
        width: int = 32,
        hidden: int = 512,
        depth: int = 2,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=sparse)
        self.films = nn.Embedding(films, width, sparse=sparse)
        self.first = nn.Linear(2 * width, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.last = nn.Linear(hidden, 1)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        known = torch.cat([self.users(users), self.films(films)], dim=1)
        hidden = functional.relu(self.first(known))
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        return self.last(hidden)[:, 0]


class TicketTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 64,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return TicketNet()

    def train_data(self) -> Dataset[Any]:
        return tickets(6144)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, departments = batch
        return Loss(functional.cross_entropy(model(tokens), departments, reduction="sum"))


class NoteTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return NoteNet()

    def train_data(self) -> Dataset[Any]:
        return melodies(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        pitches = batch[0]
        scores, following = model(pitches[:, :-1]), pitches[:, 1:]
        total = functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(total, weight=following.numel())


class CellTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return CellNet()

    def train_data(self) -> Dataset[Any]:
        return cells(2048)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        pictures, masks = batch
        total = functional.binary_cross_entropy_with_logits(
            model(pictures), masks[:, 0], reduction="sum"
        )
        return Loss(total, weight=masks.numel())


class SensorTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 64,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return SensorNet()

    def train_data(self) -> Dataset[Any]:
        return vibrations(6144)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        windows, faults = batch
        return Loss(functional.cross_entropy(model(windows), faults, reduction="sum"))


class RatingTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 1024,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return RatingNet()

    def train_data(self) -> Dataset[Any]:
        return ratings(65_536)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        users, films, liked = batch
        scores = model(users, films)
        return Loss(functional.binary_cross_entropy_with_logits(scores, liked, reduction="sum"))


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
