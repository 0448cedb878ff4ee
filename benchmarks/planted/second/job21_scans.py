"""Scans, without a bottleneck."""

from typing import Any, ClassVar

from parts import ScanTask, scans
from torch.utils.data import Dataset


class Scans(ScanTask):
    defaults: ClassVar[dict[str, Any]] = {
        **ScanTask.defaults,
        "train.batch_size": 32,
        "train.eval_every_steps": 500,
    }

    def train_data(self) -> Dataset[Any]:
        return scans(3072)

    def eval_data(self) -> Dataset[Any]:
        return scans(48, seed=2)
