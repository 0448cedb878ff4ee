"""Small jobs with hooks, which tests train, kill and resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drumline.rank.collectives import all_sum
from drumline.runs import catalog
from drumline.training.tasks.hook import Hook, Run
from drumline.training.tasks.ready_hooks import EMA, EarlyStopping, LogSamples, Unfreeze
from tests.jobs import Classify, Normalised, Points

DECAY = 0.75


class ByHand(Hook):
    """The average of the weights, as one would write it down, how many steps are in it, and the
    loss of the latest evaluation at each of them. It draws random numbers where a whole run and a
    resumed one differ."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.num_steps = 0
        self.losses = 0.0

    def start(self, run: Run) -> None:
        torch.rand(1)
        if not self.average:
            self.average = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def after_step(self, run: Run) -> None:
        self.num_steps += 1
        self.losses += run.metrics.get("loss", 0.0)
        for name, now in run.model.state_dict().items():
            before = self.average[name]
            self.average[name] = (
                DECAY * before + (1 - DECAY) * now if now.is_floating_point() else now.clone()
            )

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "num_steps": self.num_steps, "losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.rand(1)
        self.average = dict(state["average"])
        self.num_steps = state["num_steps"]
        self.losses = state["losses"]

    def after_save(self, run: Run) -> None:
        torch.rand(1)


class Hooked(Classify):
    """Stops at its second evaluation, since no loss improves by 10."""

    def hooks(self) -> Sequence[Hook]:
        samples = LogSamples(Points(3).inputs, show=str)
        return [samples, EMA(DECAY), ByHand(), EarlyStopping("loss", patience=1, min_delta=10.0)]

    def predict(self, model: nn.Module, batch: Tensor) -> list[float]:
        """With random numbers, and a collective, which all ranks must call."""
        scores = model(batch) + torch.randn(1)
        return all_sum(scores.sum(1)).tolist()


class HookedNormalised(Hooked):
    """With BatchNorm, whose statistics are averaged too."""

    def model(self) -> nn.Module:
        return Normalised.model(self)


class AskedToStop(Hook):
    """The last rank asks, once, after step 3."""

    def after_step(self, run: Run) -> None:
        if run.step == 3 and run.rank == run.world_size - 1:
            run.stop(f"rank {run.rank} has seen enough")

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": all_sum(torch.ones(1)).item()}


class Stopped(Classify):
    def hooks(self) -> Sequence[Hook]:
        return [AskedToStop()]


class Fails(Hook):
    """On rank 1, and the failure is written down."""

    def after_step(self, run: Run) -> None:
        if run.step == 2 and run.rank == 1:
            raise ValueError("the disk is full of bees")

    def failure(self, run: Run, error: BaseException) -> None:
        (run.folder / f"failed-{run.rank}").write_text(f"{run.step} {error}")
        raise OSError("and now the network")


class Failing(Classify):
    def hooks(self) -> Sequence[Hook]:
        return [Fails()]


class Hears(Hook):
    """Has no other moment."""

    def failure(self, run: Run, error: BaseException) -> None:
        run.task.log(
            "failure", f"{error} at {run.step} of epoch {run.epoch} with {list(run.metrics)}"
        )


class FailsInASchedule(Classify):
    """Between its seventh and its eighth step."""

    def hooks(self) -> Sequence[Hook]:
        return [Hears()]

    def schedule(self, step: int, total_steps: int) -> float:
        if step == 7:
            raise ValueError("no such step")
        return 1.0


class KeepsTheModel(Hook):
    def start(self, run: Run) -> None:
        self.model = run.model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model}


class Unsavable(Classify):
    def hooks(self) -> Sequence[Hook]:
        return [KeepsTheModel()]


class Thawed(Classify):
    """The first layer is trained from step 4 on."""

    def hooks(self) -> Sequence[Hook]:
        return [Unfreeze("0.", at_step=4)]


class Recorder(Hook):
    """What is called when; its records are the class's, so that a test can read them."""

    records: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, name: str, every_steps: int) -> None:
        self.name = name
        self.every_steps = every_steps

    def _record(self, moment: str, run: Run) -> None:
        self.records.append((self.name, moment, run.step))

    def start(self, run: Run) -> None:
        self._record("start", run)

    def after_step(self, run: Run) -> None:
        self._record("after_step", run)

    def before_evaluation(self, run: Run) -> None:
        self._record("before_evaluation", run)

    def after_evaluation(self, run: Run) -> None:
        self._record("after_evaluation", run)
        run.task.log("accuracy", run.metrics["accuracy"])

    def before_save(self, run: Run) -> None:
        self._record("before_save", run)

    def after_save(self, run: Run) -> None:
        self._record("after_save", run)

    def end(self, run: Run) -> None:
        self._record("end", run)
        assert catalog.list_steps(run.folder / "checkpoints")[-1] == run.step


class Recorded(Classify):
    def hooks(self) -> Sequence[Hook]:
        return [Recorder("first", 2), Recorder("second", 4)]
