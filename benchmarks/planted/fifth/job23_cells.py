"""Cells with a limit of the gradient and a rare evaluation, without a bottleneck."""

from typing import Any, ClassVar

from parts import CellTask, cells
from torch.utils.data import Dataset

from drumline import Hook


class LastLayer(Hook):
    """The size of the last layer, for a curve."""

    every_steps = 20

    def after_step(self, run: Any) -> None:
        run.log("last_layer", run.model.last.weight.norm())


class Cells(CellTask):
    defaults: ClassVar[dict[str, Any]] = {
        **CellTask.defaults,
        "train.batch_size": 48,
        "train.eval_every_steps": 300,
        "optim.clip_norm": 1.0,
    }

    def eval_data(self) -> Dataset[Any]:
        return cells(64, seed=2)

    def hooks(self) -> list[Hook]:
        return [LastLayer()]
