"""What the jobs of this folder share: data in memory, two small networks and their tasks.

With PLANTED=off in the environment a job runs without its bottleneck.
"""

import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from drumline import Loss, Task

PLANTED = os.environ.get("PLANTED", "on") == "on"
STEPS = int(os.environ.get("STEPS", "60"))
VOCABULARY = 96
LINE_LENGTH = 64


def pictures(count: int, seed: int = 1) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=random)
    labels = torch.randint(10, (count,), generator=random)
    return TensorDataset(images, labels)


def lines(count: int, seed: int = 1) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randint(VOCABULARY, (count, LINE_LENGTH + 1), generator=random, dtype=torch.long)
    )


class PictureNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.scores = nn.Linear(64 * 8 * 8, 10)

    def features(self, images: Tensor) -> Tensor:
        maps = functional.max_pool2d(functional.relu(self.first(images)), 2)
        return functional.max_pool2d(functional.relu(self.second(maps)), 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.scores(self.features(images).flatten(1))


class LineNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, VOCABULARY)

    def hidden(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        return self.encoder(self.embedding(tokens), mask=mask, is_causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.hidden(tokens))


def line_loss(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(
        scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction
    )


class PictureTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return PictureNet()

    def train_data(self) -> Dataset[Any]:
        return pictures(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, labels = batch
        return Loss(functional.cross_entropy(model(images), labels, reduction="sum"))


class LineTask(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 32,
        "optim.lr": 0.01,
    }

    def model(self) -> nn.Module:
        return LineNet()

    def train_data(self) -> Dataset[Any]:
        return lines(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens = batch[0]
        return Loss(line_loss(model, tokens, "sum"), weight=tokens[:, 1:].numel())


def start() -> torch.device:
    """Collective: joins the process group, and returns the device of this rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def batches(data: Dataset[Any], batch_size: int = 16, num_workers: int = 0) -> DataLoader[Any]:
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size, sampler=sampler, num_workers=num_workers, drop_last=True)


def finish(steps: int, seconds: float) -> None:
    """Collective: prints the time of the loop on rank 0, and leaves the group."""
    if dist.get_rank() == 0:
        print(f"done: {steps} steps in {seconds:.3f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
