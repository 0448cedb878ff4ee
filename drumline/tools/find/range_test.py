"""The range test of `drumline find-lr`: optimizer steps of the run's own global batch at rates that
grow from step to step, and the rate that their losses suggest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from torch import nn

from drumline.base.errors import TrainingError
from drumline.config.schema import Config
from drumline.data.loader import Step
from drumline.data.stream_loader import AnyLoader
from drumline.rank.collectives import all_sum
from drumline.rank.determinism import explain_refused_kernels
from drumline.training.failure_report import explain_out_of_memory
from drumline.training.job.initial_weights import load_initial_weights
from drumline.training.job.job import Job, build_job, check_streams
from drumline.training.job.optimizer import LearningRates
from drumline.training.manager import RunManager
from drumline.training.steps.choice import make_step
from drumline.training.steps.warm_up import warm_up
from drumline.training.tasks.base import Task
from drumline.watch.heartbeat import DATA

# Steps on each side of one whose losses are averaged with its own.
REACH = 2
# The loss has diverged when it is this many times the lowest so far, and above the first.
DIVERGED = 4
# A fall of the smoothed loss by fewer standard deviations of the noise than this may be noise
# itself: of 1,000 curves of noise alone 4 fall by more, with 2 it would be 139.
NOISE = 3.5
# So is one by less than this fraction of the loss.
LEAST_FALL = 0.001
# The suggestion is this fraction of the rate with the lowest loss.
SAFETY = 10


@dataclass(frozen=True)
class RangeOptions:
    """The rates of a range test, from the first step to the last."""

    low: float
    high: float
    steps: int

    def rate(self, step: int) -> float:
        """Of step `step`, counted from 0: each is the same factor above the one before."""
        return float(self.low * (self.high / self.low) ** (step / max(1, self.steps - 1)))


@dataclass(frozen=True)
class RangeTest:
    """What a range test measured; the same on every rank."""

    rates: Sequence[float]
    """The highest of the parameter groups, in each step; the others keep their ratio to it."""
    losses: Sequence[float]
    """The mean over the whole global batch, before the update of the step."""
    has_diverged: bool
    setting: float
    """What a rate is multiplied by for `--optim.lr`: not 1 with --optim.scale_lr."""
    own_optimizer: str | None
    """The method of the task that sets the rates, in place of `--optim.lr`."""

    @property
    def smooth(self) -> list[float]:
        """The smoothed losses."""
        return smoothed(self.losses)

    @property
    def lowest(self) -> int:
        """The step with the lowest smoothed loss."""
        smooth = self.smooth
        return smooth.index(min(smooth))

    def suggestion(self) -> float:
        """A tenth of the rate at which the loss was lowest. By then it is about to rise, so that
        rate is too high; the steepest descent, the other rule in use, depends far more on the noise
        of single batches."""
        smooth = self.smooth
        lowest = self.lowest
        before = zip(self.losses[: lowest + 1], smooth[: lowest + 1], strict=True)
        apart = [loss - mean for loss, mean in before if math.isfinite(mean)]
        noise = NOISE * pstdev(apart or [0.0])
        fall = smooth[0] - smooth[lowest]

        if not fall > max(noise, LEAST_FALL * abs(smooth[0])):
            raise TrainingError(
                f"no rate from {self.rates[0]:.2g} to {self.rates[-1]:.2g} lowered the loss by more than it varies "
                f"from step to step: {smooth[0]:.4g} at the lowest rate, {smooth[lowest]:.4g} at best",
                next_step="give more --steps, another range with --low and --high, or a larger --train.batch_size",
            )

        if not self.has_diverged and lowest >= len(smooth) - 1 - REACH:
            raise TrainingError(
                f"the loss was still falling at the highest rate, {self.rates[-1]:.2g}, so the best is above it",
                next_step=f"give --high {100 * self.rates[-1]:.2g}",
            )

        return float(f"{self.rates[lowest] / SAFETY:.2g}")


def measure_range(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    options: RangeOptions,
    *,
    note: Callable[[str], None],
    on_step: Callable[[int, float, float], None] = lambda number, rate, loss: None,
) -> RangeTest:
    """Collective: train from the initial weights until the loss diverges or the highest rate is
    reached. Nothing is written. `on_step` gets each step's number, rate and loss."""
    # its trials would take longer than the test
    if config.train.step in (None, "auto"):
        config = replace(config, train=replace(config.train, step="eager"))

    task = task_class(config)

    def begin(model: nn.Module) -> None:
        """Load the weights that the run begins with."""
        load_initial_weights(config.model, model, ddp, lambda kind, message: note(message))

    job = build_job(config, task, ddp, on_model=None if config.model.init is None else begin)
    losses: list[float] = []
    try:
        with explain_refused_kernels(), explain_out_of_memory(config, job):
            check_streams(job)
            warm_up(job, config, note=note)
            for loss in _losses(job, config, options):
                on_step(len(losses), options.rate(len(losses)), loss)
                losses.append(loss)
                if diverges(losses):
                    break
    finally:
        job.close()

    own_optimizer = None
    if type(task).optimizer is not Task.optimizer:
        own_optimizer = f"{task_class.__name__}.optimizer()"

    return RangeTest(
        [options.rate(step) for step in range(len(losses))],
        losses,
        diverges(losses),
        config.optim.lr / job.rates.peak,
        own_optimizer,
    )


def _losses(job: Job, config: Config, options: RangeOptions) -> Iterator[float]:
    """Collective: the loss of each step, over all ranks."""
    rates = LearningRates(
        job.optimizer, config.optim, lambda step, _: options.rate(step) / job.rates.peak
    )
    train_step = make_step(job, config)
    for number, step in zip(range(options.steps), endless(job.loader), strict=False):
        job.heartbeat.begin_step(number)
        job.heartbeat.mark(DATA)
        rates.set(number, options.steps)
        train_step(step)
        loss, weight, *_ = all_sum(job.meter.take()).tolist()
        # With `--train.on_nan skip` a step that is left out counts nothing.
        yield loss / weight if weight else math.nan


def endless(loader: AnyLoader) -> Iterator[Step]:
    """Its steps, epoch after epoch."""
    while True:
        yield from loader.steps()


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with its neighbours on both sides, which shifts nothing to later steps, as
    a running average would; one that is not finite is infinite, with those that it is averaged
    into.

    With a reach of one step, `[4, 1, 1, 7]` would be `[2.5, 2, 3, 4]`.
    """
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    means = []
    for step in range(len(finite)):
        first = max(0, step - REACH)
        means.append(fmean(finite[first : step + REACH + 1]))

    return means


def diverges(losses: Sequence[float]) -> bool:
    """Whether the latest loss is not finite, or the latest few are far above the lowest, and above
    the first.

    `[2.0, 1.0, 30.0]` does; `[2.0, 1.0, 2.5]` does not.
    """
    if not math.isfinite(losses[-1]):
        return True

    means = [fmean(losses[max(0, step - REACH) : step + 1]) for step in range(len(losses))]
    lowest = min(means)
    return means[-1] > max(means[0], lowest + (DIVERGED - 1) * abs(lowest))
