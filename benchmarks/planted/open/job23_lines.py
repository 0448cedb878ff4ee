"""Lines of text with evaluations, saves and a hook now and then, without a bottleneck."""

from typing import Any, ClassVar

from parts import LineTask, lines
from torch.utils.data import Dataset

from drumline import Hook


class WeightNorm(Hook):
    every_steps = 50

    def after_step(self, run: Any) -> None:
        run.log("weight_norm", sum(weight.norm() for weight in run.model.parameters()))


class Lines(LineTask):
    defaults: ClassVar[dict[str, Any]] = {
        **LineTask.defaults,
        "train.batch_size": 96,
        "train.eval_every_steps": 1000,
        "checkpoint.every_steps": 1000,
    }

    def eval_data(self) -> Dataset[Any]:
        return lines(128, seed=2)

    def hooks(self) -> list[Hook]:
        return [WeightNorm()]
