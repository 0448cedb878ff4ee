"""Recipes, with a hook that sends figures to a server."""

import json
from http.client import HTTPConnection
from typing import Any, ClassVar

from parts import PLANTED, RecipeNet, RecipeTask, far_server
from torch import nn

from drumline import Hook


class Dashboard(Hook):
    """Sends what a page in the office shows."""

    every_steps = 1 if PLANTED else 1000

    def start(self, run: Any) -> None:
        if run.rank == 0:
            self.port = far_server()

    def after_step(self, run: Any) -> None:
        if run.rank == 0:
            self.send("epoch", run.epoch, run.step)
            self.send("rate", run.optimizer.param_groups[0]["lr"], run.step)
            self.send("words", run.step * 16 * 64, run.step)

    def send(self, name: str, value: float, step: int) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        body = json.dumps({"name": name, "value": value, "step": step})
        connection.request("POST", "/metrics", body)  # planted
        connection.getresponse().read()  # planted: waits for the answer, three times a step
        connection.close()


class Recipes(RecipeTask):
    defaults: ClassVar[dict[str, Any]] = {**RecipeTask.defaults, "train.batch_size": 16}

    def model(self) -> nn.Module:
        return RecipeNet(width=64)

    def hooks(self) -> list[Hook]:
        return [Dashboard()]
