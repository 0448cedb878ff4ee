"""Photos of leaves, with a hook that tests the network on one rank."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, LeafTask, leaves
from torch.utils.data import DataLoader

from drumline import Hook


class Test(Hook):
    every_steps = 5 if PLANTED else 1000

    def __init__(self) -> None:
        self.photos = DataLoader(leaves(768, seed=2), 64)

    def after_step(self, run: Any) -> None:
        right = self.right(run.model, run.device) if run.rank == 0 else 0  # planted: rank 0 alone
        run.log("right", right)

    @torch.no_grad()
    def right(self, network: Any, device: torch.device) -> int:
        network.eval()
        total = 0
        for photos, species in self.photos:
            scores = network(photos.to(device))  # planted
            total += int((scores.argmax(1) == species.to(device)).sum())
        network.train()
        return total


class Leaves(LeafTask):
    defaults: ClassVar[dict[str, Any]] = {**LeafTask.defaults, "train.batch_size": 48}

    def hooks(self) -> list[Hook]:
        return [Test()]
