"""A dataset of Hugging Face's `datasets`, from a folder that `save_to_disk` wrote: by index, or as a stream.

drumline train examples/hf_dataset.py:Table --data.dir table
"""

from typing import Any, ClassVar

import datasets
import numpy as np
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from spirals import Net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from drumline import Loss, Task


class Rows:
    """Whole batches. The dataset itself would do as well, for rows that `collate` pads or that are augmented by chance;
    but it is then asked for one row after another, which takes many times longer."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows.with_format("torch")

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray, draws: Any) -> dict[str, Tensor]:
        return self.rows[indices.tolist()]


class Table(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "data.dir": "table",  # a DatasetDict with "train" and "eval", which have the columns "point" and "arm"
        "train.epochs": 10,
        "train.batch_size": 64,
        "optim.lr": 0.2,
    }
    best_metric, higher_is_better = "accuracy", True

    streaming: bool = False
    """Read rows one after another, as from `load_dataset(..., streaming=True)`; needs --train.steps and
    --checkpoint.every_steps."""

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Any:
        rows = datasets.load_from_disk(self.config.data.dir)["train"]
        if not self.streaming:
            return Rows(rows)  # Drumline shuffles: each row once an epoch, the same batches on any number of ranks
        # Each rank reads shards of its own, and the dataset's own state says where it is. No .shuffle(buffer_size=...)
        # here: what is in its buffer is not in that state, and would be lost in a resume.
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        stream = rows.with_format("torch").to_iterable_dataset(num_shards=4 * world_size)
        return split_dataset_by_node(stream, rank, world_size)

    def eval_data(self) -> Rows:
        return Rows(datasets.load_from_disk(self.config.data.dir)["eval"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        scores, arm = model(batch["point"]), batch["arm"]  # a batch has the names of the columns
        correct = (scores.argmax(1) == arm).sum()
        return Loss(cross_entropy(scores, arm, reduction="sum"), metrics={"accuracy": correct})
