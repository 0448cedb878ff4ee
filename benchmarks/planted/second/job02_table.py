"""A small table, read by four loading processes, in epochs of three steps."""

from typing import Any, ClassVar

from parts import PLANTED, TableTask, rows
from torch.utils.data import Dataset


class Table(TableTask):
    defaults: ClassVar[dict[str, Any]] = {
        **TableTask.defaults,
        "checkpoint.every_epochs": 0,
        "data.workers": 4,
        "data.persistent_workers": not PLANTED,  # planted: they start again in every epoch
    }

    def train_data(self) -> Dataset[Any]:
        return rows(1536)
