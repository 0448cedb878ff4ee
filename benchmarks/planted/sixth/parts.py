"""What the jobs of this folder share: five kinds of data in memory, their networks and tasks.

With PLANTED=off in the environment a job runs without its bottleneck.
"""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from drumline import Loss, Task

PLANTED = os.environ.get("PLANTED", "on") == "on"
STEPS = int(os.environ.get("STEPS", "60"))

ROOF_SIZE = 48
ROOFS = 6
WORDS = 600
RECIPE_LENGTH = 64
QUARTERS = 96
HOUSEHOLDS = 8
PEOPLE = 4000
ADVERTS = 1000
NUMBERS = 12
LETTERS = 24
PROTEIN_LENGTH = 96
FAMILIES = 10


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def roofs(count: int, size: int = ROOF_SIZE, seed: int = 1) -> TensorDataset:
    """Pictures from the air, and the kind of each roof."""
    random = seeded(seed)
    pictures = torch.rand(count, 3, size, size, generator=random)
    return TensorDataset(pictures, torch.randint(ROOFS, (count,), generator=random))


def recipes(count: int, length: int = RECIPE_LENGTH, words: int = WORDS) -> TensorDataset:
    """Words of recipes as numbers, one more than the network reads."""
    return TensorDataset(torch.randint(1, words, (count, length + 1), generator=seeded(1)))


def meters(count: int, seed: int = 1) -> TensorDataset:
    """Power by quarter of an hour of a day, and the kind of household."""
    random = seeded(seed)
    days = torch.rand(count, 1, QUARTERS, generator=random)
    return TensorDataset(days, torch.randint(HOUSEHOLDS, (count,), generator=random))


def adverts(count: int, seed: int = 1) -> TensorDataset:
    """Who saw which advert, some numbers about it, and whether they clicked."""
    random = seeded(seed)
    people = torch.randint(PEOPLE, (count,), generator=random)
    shown = torch.randint(ADVERTS, (count,), generator=random)
    numbers = torch.randn(count, NUMBERS, generator=random)
    return TensorDataset(people, shown, numbers, torch.rand(count, generator=random).round())


def proteins(count: int, length: int = PROTEIN_LENGTH, seed: int = 1) -> TensorDataset:
    """Letters of proteins, and their families."""
    random = seeded(seed)
    letters = torch.randint(LETTERS, (count, length), generator=random)
    return TensorDataset(letters, torch.randint(FAMILIES, (count,), generator=random))


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU())


class RoofNet(nn.Module):
    """Convolutions, each level half as large, then the mean over the picture."""

    def __init__(self, width: int = 24, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(3, width, 2),
            *[convolution(width, width) for _ in range(depth)],
            convolution(width, 2 * width, 2),
            convolution(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, ROOFS)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.layers(pictures).mean((2, 3)))


class Block(nn.Module):
    """Attention and two linear layers, each beside a residual path."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.wide_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, causal: bool = False) -> Tensor:
        parts = self.inputs(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.wide_norm(hidden))))


class Reader(nn.Module):
    """Embeddings of pieces and places, and blocks: a vector for each place."""

    def __init__(self, pieces: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.pieces = nn.Embedding(pieces, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, pieces: Tensor, causal: bool = False) -> Tensor:
        hidden = self.pieces(pieces) + self.places[: pieces.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, causal)
        return hidden


class RecipeNet(nn.Module):
    """A small causal transformer over words."""

    def __init__(self, width: int = 96, depth: int = 2, words: int = WORDS) -> None:
        super().__init__()
        self.reader = Reader(words, RECIPE_LENGTH, width, depth)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.reader(words, causal=True))


class ProteinNet(nn.Module):
    """A small encoder, then the mean over the letters."""

    def __init__(self, width: int = 64, depth: int = 2, outputs: int = FAMILIES) -> None:
        super().__init__()
        self.reader = Reader(LETTERS, PROTEIN_LENGTH, width, depth)
        self.head = nn.Linear(width, outputs)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.reader(letters).mean(1))


class MeterNet(nn.Module):
    """Convolutions over the day, then the mean over it."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4),
            nn.ReLU(),
            nn.Conv1d(width, width, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, HOUSEHOLDS)

    def forward(self, days: Tensor) -> Tensor:
        return self.head(self.layers(days).mean(2))


class AdvertNet(nn.Module):
    """Embeddings of the person and of the advert, then wide layers."""

    def __init__(self, width: int = 16, hidden: int = 384, depth: int = 2) -> None:
        super().__init__()
        self.people = nn.Embedding(PEOPLE, width)
        self.adverts = nn.Embedding(ADVERTS, width)
        self.first = nn.Linear(2 * width + NUMBERS, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.last = nn.Linear(hidden, 1)

    def forward(self, people: Tensor, shown: Tensor, numbers: Tensor) -> Tensor:
        known = torch.cat([self.people(people), self.adverts(shown), numbers], dim=1)
        hidden = functional.relu(self.first(known))
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        return self.last(hidden)[:, 0]


SETTINGS: dict[str, Any] = {"train.steps": STEPS, "checkpoint.every_epochs": 0}


class RoofTask(Task):
    defaults: ClassVar[dict[str, Any]] = {**SETTINGS, "train.batch_size": 64, "optim.lr": 0.01}

    def model(self) -> nn.Module:
        return RoofNet()

    def train_data(self) -> Dataset[Any]:
        return roofs(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        pictures, kinds = batch
        return Loss(functional.cross_entropy(model(pictures), kinds, reduction="sum"))


class RecipeTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        **SETTINGS,
        "train.batch_size": 32,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return RecipeNet()

    def train_data(self) -> Dataset[Any]:
        return recipes(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch[0]
        scores, following = model(words[:, :-1]), words[:, 1:]
        total = functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(total, weight=following.numel())


class MeterTask(Task):
    defaults: ClassVar[dict[str, Any]] = {**SETTINGS, "train.batch_size": 128, "optim.lr": 0.01}

    def model(self) -> nn.Module:
        return MeterNet()

    def train_data(self) -> Dataset[Any]:
        return meters(8192)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        days, households = batch
        return Loss(functional.cross_entropy(model(days), households, reduction="sum"))


class AdvertTask(Task):
    defaults: ClassVar[dict[str, Any]] = {**SETTINGS, "train.batch_size": 1024, "optim.lr": 0.01}

    def model(self) -> nn.Module:
        return AdvertNet()

    def train_data(self) -> Dataset[Any]:
        return adverts(65_536)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        people, shown, numbers, clicked = batch
        scores = model(people, shown, numbers)
        return Loss(functional.binary_cross_entropy_with_logits(scores, clicked, reduction="sum"))


class ProteinTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        **SETTINGS,
        "train.batch_size": 32,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return ProteinNet()

    def train_data(self) -> Dataset[Any]:
        return proteins(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        letters, families = batch
        return Loss(functional.cross_entropy(model(letters), families, reduction="sum"))


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


class FarServer(BaseHTTPRequestHandler):
    """Answers each metric after a while, as a server in another region does."""

    answer_s = 0.06

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.answer_s)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Writes no log."""


def far_server() -> int:
    """Starts a server for metrics, and returns its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FarServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port
