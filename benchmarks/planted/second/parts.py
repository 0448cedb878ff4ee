"""What the jobs of this folder share: six kinds of data in memory, their networks and tasks.

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
ON_GPU = torch.cuda.is_available()

SOUNDS = 8
COLUMNS = 40
NODES = 64
NEIGHBOURS = 4
NODE_FEATURES = 16
WORDS = 2000
TAGS = 14
ITEMS = 2000
HISTORY = 30


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clips(count: int, length: int = 4000, seed: int = 1) -> TensorDataset:
    """Short recordings, each of one of a few sounds."""
    random = seeded(seed)
    waves = torch.rand(count, 1, length, generator=random) * 2 - 1
    return TensorDataset(waves, torch.randint(SOUNDS, (count,), generator=random))


def rows(count: int, seed: int = 1) -> TensorDataset:
    """Rows of a table, with a number to predict."""
    random = seeded(seed)
    cells = torch.randn(count, COLUMNS, generator=random)
    return TensorDataset(cells, cells[:, :5].sum(1))


def meshes(count: int, nodes: int = NODES, seed: int = 1) -> TensorDataset:
    """Values at the nodes of a mesh, and a class of each node."""
    random = seeded(seed)
    values = torch.randn(count, nodes, NODE_FEATURES, generator=random)
    return TensorDataset(values, torch.randint(4, (count, nodes), generator=random))


def mesh_neighbours(nodes: int = NODES) -> Tensor:
    return torch.randint(nodes, (nodes, NEIGHBOURS), generator=seeded(9))


def scans(count: int, size: int = 48, seed: int = 1) -> TensorDataset:
    """Grey images with a mask of the same size."""
    images = torch.randn(count, 1, size, size, generator=seeded(seed))
    return TensorDataset(images, (images > 0.5).float())


def sentences(count: int, length: int = 48, seed: int = 1) -> TensorDataset:
    random = seeded(seed)
    words = torch.randint(WORDS, (count, length), generator=random)
    return TensorDataset(words, words % TAGS)


def visits(count: int, items: int = ITEMS, seed: int = 1) -> TensorDataset:
    """What visitors have seen, what they see next, and how they rate it."""
    random = seeded(seed)
    seen = torch.randint(items, (count, HISTORY), generator=random)
    following = torch.randint(items, (count,), generator=random)
    return TensorDataset(seen, following, torch.rand(count, generator=random))


class ClipNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 16, stride=4),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 8, stride=4),
            nn.ReLU(),
            nn.Conv1d(2 * width, 2 * width, 8, stride=2),
            nn.ReLU(),
        )
        self.scores = nn.Linear(2 * width, SOUNDS)

    def forward(self, waves: Tensor) -> Tensor:
        return self.scores(self.layers(waves).mean(2))


class TableNet(nn.Module):
    def __init__(self, width: int = 512, depth: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(COLUMNS, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, cells: Tensor) -> Tensor:
        return self.layers(cells)[:, 0]


class MeshNet(nn.Module):
    """Each node gets the mean of its neighbours, in several rounds."""

    neighbours: Tensor

    def __init__(self, width: int = 64, rounds: int = 3, nodes: int = NODES) -> None:
        super().__init__()
        self.register_buffer("neighbours", mesh_neighbours(nodes))
        self.first = nn.Linear(NODE_FEATURES, width)
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.scores = nn.Linear(width, 4)

    def messages(self, values: Tensor) -> Tensor:
        return values[:, self.neighbours].mean(2)

    def forward(self, values: Tensor) -> Tensor:
        values = functional.relu(self.first(values))
        for layer in self.rounds:
            joined = torch.cat([values, self.messages(values)], dim=2)
            values = values + functional.relu(layer(joined))
        return self.scores(values)


class ScanNet(nn.Module):
    """A small U-Net."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = functional.relu(self.down(images))
        coarse = functional.relu(self.middle(functional.max_pool2d(fine, 2)))
        coarse = functional.relu(self.bottom(coarse))
        return self.last(torch.cat([fine, self.up(coarse)], dim=1))


class TagNet(nn.Module):
    def __init__(self, width: int = 64, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.reader = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * width, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(self.reader(self.embedding(words))[0])


class VisitNet(nn.Module):
    def __init__(self, items: int = ITEMS, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.layers = nn.Sequential(
            nn.Linear(2 * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        known = self.items(seen).mean(1)
        return self.layers(torch.cat([known, self.items(following)], dim=1))[:, 0]


def tag_loss(scores: Tensor, tags: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), tags.flatten(), reduction=reduction)


class ClipTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return ClipNet()

    def train_data(self) -> Dataset[Any]:
        return clips(2048)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        waves, sounds = batch
        return Loss(functional.cross_entropy(model(waves), sounds, reduction="sum"))


class TableTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 512,
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return TableNet()

    def train_data(self) -> Dataset[Any]:
        return rows(32_768)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        cells, targets = batch
        return Loss(functional.smooth_l1_loss(model(cells), targets, reduction="sum"))


class MeshTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 64,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return MeshNet()

    def train_data(self) -> Dataset[Any]:
        return meshes(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        values, classes = batch
        total = functional.cross_entropy(
            model(values).flatten(0, 1), classes.flatten(), reduction="sum"
        )
        return Loss(total, weight=classes.numel())


class ScanTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 16,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return ScanNet()

    def train_data(self) -> Dataset[Any]:
        return scans(1536)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, masks = batch
        total = functional.binary_cross_entropy_with_logits(model(images), masks, reduction="sum")
        return Loss(total, weight=masks.numel())


class TagTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.05,
    }

    def model(self) -> nn.Module:
        return TagNet()

    def train_data(self) -> Dataset[Any]:
        return sentences(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, tags = batch
        return Loss(tag_loss(model(words), tags, "sum"), weight=tags.numel())


class VisitTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 512,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return VisitNet()

    def train_data(self) -> Dataset[Any]:
        return visits(32_768)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        seen, following, ratings = batch
        return Loss(functional.mse_loss(model(seen, following), ratings, reduction="sum"))


def start() -> torch.device:
    """Collective: joins the process group, and returns the device of this rank."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(0)
    if not ON_GPU:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def batches(data: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    """Batches of this rank; the size is that of one rank."""
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=True, **options)


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def finish(steps: int, seconds: float) -> None:
    """Collective: prints the time of the loop on rank 0, and leaves the group."""
    report(steps, seconds)
    dist.barrier()
    dist.destroy_process_group()


def report(steps: int, seconds: float) -> None:
    if dist.get_rank() == 0:
        print(f"done: {steps} steps in {seconds:.3f} s", flush=True)
