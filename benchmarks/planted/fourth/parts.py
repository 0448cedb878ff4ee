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

LEAF_SIZE = 40
SPECIES = 12
WORDS = 800
LENGTH = 64
STARS = 5
NUMBERS = 40
CHOICES = 50
COLUMNS = 8
ATOMS = 24
ATOM_FEATURES = 16
BANDS = 40
FRAMES = 160
COMMANDS = 20


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leaves(count: int, size: int = LEAF_SIZE, seed: int = 1) -> TensorDataset:
    """Colour photos of leaves, from 0 to 1, and their species."""
    random = seeded(seed)
    photos = torch.rand(count, 3, size, size, generator=random)
    return TensorDataset(photos, torch.randint(SPECIES, (count,), generator=random))


def reviews(count: int, length: int = LENGTH, seed: int = 1) -> TensorDataset:
    """Words of reviews, all as long, and their stars. Word 0 is padding."""
    random = seeded(seed)
    words = torch.randint(1, WORDS, (count, length), generator=random)
    return TensorDataset(words, torch.randint(STARS, (count,), generator=random))


def loans(count: int, seed: int = 1) -> TensorDataset:
    """Numbers and choices of a form, and whether the loan was paid back."""
    random = seeded(seed)
    numbers = torch.randn(count, NUMBERS, generator=random)
    choices = torch.randint(CHOICES, (count, COLUMNS), generator=random)
    return TensorDataset(numbers, choices, torch.rand(count, generator=random).round())


def molecules(count: int, atoms: int = ATOMS, seed: int = 1) -> TensorDataset:
    """Features of atoms, which of them are bound, and an energy."""
    random = seeded(seed)
    features = torch.randn(count, atoms, ATOM_FEATURES, generator=random)
    bonds = (torch.rand(count, atoms, atoms, generator=random) < 0.1).float()
    bonds = torch.maximum(bonds, bonds.transpose(1, 2))
    return TensorDataset(features, bonds, torch.randn(count, generator=random))


def speech(count: int, frames: int = FRAMES, seed: int = 1) -> TensorDataset:
    """Spectrograms of spoken commands, and the numbers of the commands."""
    random = seeded(seed)
    sounds = torch.randn(count, BANDS, frames, generator=random)
    return TensorDataset(sounds, torch.randint(COMMANDS, (count,), generator=random))


class LeafNet(nn.Module):
    """Convolutions, then one layer for the species."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * width, SPECIES)

    def forward(self, photos: Tensor) -> Tensor:
        return self.head(self.backbone(photos).mean((2, 3)))


class ReviewLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, known: Tensor) -> Tensor:
        parts = self.inputs(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=known[:, None, None]
        )
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


class ReviewNet(nn.Module):
    """A small encoder, then the mean over the words."""

    def __init__(self, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(ReviewLayer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, STARS)

    def encoded(self, words: Tensor) -> Tensor:
        known = words != 0
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden, known)
        parts = known[:, :, None].to(hidden.dtype)
        return (hidden * parts).sum(1) / parts.sum(1).clamp(min=1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoded(words))


class LoanNet(nn.Module):
    """Embeddings of the choices beside the numbers, then wide layers."""

    def __init__(self, hidden: int = 512, depth: int = 3) -> None:
        super().__init__()
        self.choices = nn.EmbeddingBag(COLUMNS * CHOICES, 32, mode="sum")
        self.first = nn.Linear(NUMBERS + 32, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.last = nn.Linear(hidden, 1)

    def forward(self, numbers: Tensor, choices: Tensor) -> Tensor:
        places = choices + CHOICES * torch.arange(COLUMNS, device=choices.device)
        known = torch.cat([numbers, self.choices(places)], dim=1)
        hidden = functional.relu(self.first(known))
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        return self.last(hidden)[:, 0]


class MoleculeLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        messages = bonds @ self.message(atoms)
        return atoms + functional.relu(self.update(torch.cat([atoms, messages], dim=2)))


class MoleculeNet(nn.Module):
    """Messages along bonds, then the sum over the atoms."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(ATOM_FEATURES, width)
        self.layers = nn.ModuleList(MoleculeLayer(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, features: Tensor, bonds: Tensor) -> Tensor:
        shares = bonds / bonds.sum(2, keepdim=True).clamp(min=1)
        atoms = self.first(features)
        for layer in self.layers:
            atoms = layer(atoms, shares)
        return self.last(atoms.mean(1))[:, 0]


class SpeechNet(nn.Module):
    """Convolutions over time, then a weighted mean over it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.GELU(),
        )
        self.weights = nn.Conv1d(2 * width, 1, 1)
        self.head = nn.Linear(2 * width, COMMANDS)

    def forward(self, sounds: Tensor) -> Tensor:
        hidden = self.layers(sounds)
        shares = self.weights(hidden).softmax(2)
        return self.head((hidden * shares).sum(2))


class LeafTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 48,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return LeafNet()

    def train_data(self) -> Dataset[Any]:
        return leaves(3072)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        photos, species = batch
        return Loss(functional.cross_entropy(model(photos), species, reduction="sum"))


class ReviewTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 48,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return ReviewNet()

    def train_data(self) -> Dataset[Any]:
        return reviews(6144)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, stars = batch
        return Loss(functional.cross_entropy(model(words), stars, reduction="sum"))


class LoanTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 1024,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return LoanNet()

    def train_data(self) -> Dataset[Any]:
        return loans(65_536)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        numbers, choices, paid = batch
        scores = model(numbers, choices)
        return Loss(functional.binary_cross_entropy_with_logits(scores, paid, reduction="sum"))


class MoleculeTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 128,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return MoleculeNet()

    def train_data(self) -> Dataset[Any]:
        return molecules(8192)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, bonds, energies = batch
        return Loss(functional.mse_loss(model(features, bonds), energies, reduction="sum"))


class SpeechTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 48,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return SpeechNet()

    def train_data(self) -> Dataset[Any]:
        return speech(3072)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        sounds, commands = batch
        return Loss(functional.cross_entropy(model(sounds), commands, reduction="sum"))


def calmed(network: nn.Module) -> nn.Module:
    """A deep network that begins with weak layers, so that its outputs stay small."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.startswith("layers."):
                weight *= 0.1
    return network


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
