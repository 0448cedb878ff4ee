"""Molecules with an average of the weights and a number in the log, without a bottleneck."""

from typing import Any, ClassVar

from parts import MoleculeTask

from drumline import EMA, Hook


class Spread(Hook):
    every_steps = 10

    def after_step(self, run: Any) -> None:
        run.log("spread", run.model.last.weight.std())


class Molecules(MoleculeTask):
    defaults: ClassVar[dict[str, Any]] = {**MoleculeTask.defaults, "train.batch_size": 768}

    def hooks(self) -> list[Hook]:
        return [EMA(0.99, every_steps=10), Spread()]
