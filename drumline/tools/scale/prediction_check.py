"""Compares earlier predictions with what was measured since, by `scale measure` or a profile. No
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drumline.base.errors import UsageError
from drumline.runs.profile_result import PROFILE_FILE, PROFILE_FOLDER, read_profile
from drumline.runs.scaling_result import Measurement, PredictedSize, Prediction, Range, read_scaling
from drumline.tools.scale.network_model import is_nominal


class SizedJob(NamedTuple):
    """What a prediction and a measurement must have in common to be compared."""

    task: str
    device: str
    batch_per_rank: float | None
    nodes: int
    ranks: int


class MeasuredStep(NamedTuple):
    """The step of a job, wherever it was measured."""

    made_at: float
    job: SizedJob
    step_s: float
    run: str


@dataclass(frozen=True, kw_only=True)
class CheckedSize:
    """A prediction, and what was measured."""

    task: str
    network: str
    nodes: int
    ranks: int
    predicted_s: Range
    measured_s: float
    run: str

    @property
    def error(self) -> float:
        """Positive: predicted too long."""
        return self.predicted_s[1] / self.measured_s - 1

    @property
    def is_within(self) -> bool:
        """Whether the measured step is in the predicted interval."""
        return self.predicted_s[0] <= self.measured_s <= self.predicted_s[2]


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """What became of the predictions in some run folders."""

    sizes: tuple[CheckedSize, ...]
    unmeasured: int
    """Predicted sizes that were not measured since."""
    other_networks: tuple[str, ...]
    """The networks of predictions that were not compared, since nothing says that the runs used
    them."""


def check_predictions(runs: Sequence[Path], *, network: str | None = None) -> PredictionCheck:
    """Each prediction with the newest later measurement of the same job on as many nodes and ranks.

    A measurement does not know the name of its network: `network` is it. Without that, predictions
    for a network by name are compared on a single node only, and those for a measured network on
    all."""
    predictions = [prediction for run in runs for prediction in read_scaling(run, Prediction)]
    if not predictions:
        raise UsageError(
            f"there is no prediction in {', '.join(map(str, runs))}",
            next_step="make one: drumline scale predict RUN --nodes 2,8 --network 100gbit",
        )

    steps = [step for run in runs for step in _measured_steps(run)]
    steps.sort(key=lambda step: step.made_at)
    checked: list[CheckedSize] = []

    unmeasured = 0
    other_networks: set[str] = set()
    for prediction in predictions:
        is_same_network = prediction.network == network
        if network is None:
            is_same_network = not is_nominal(prediction.network)

        for size in prediction.sizes:
            step = _newest_step(prediction, size, steps)
            if step is None:
                unmeasured += 1
            elif size.nodes > 1 and not is_same_network:
                other_networks.add(prediction.network)
            else:
                checked.append(
                    CheckedSize(
                        task=prediction.task,
                        network=prediction.network,
                        nodes=size.nodes,
                        ranks=size.ranks,
                        predicted_s=size.step_s,
                        measured_s=step.step_s,
                        run=step.run,
                    )
                )

    return PredictionCheck(
        sizes=tuple(checked), unmeasured=unmeasured, other_networks=tuple(sorted(other_networks))
    )


def _newest_step(
    prediction: Prediction,
    size: PredictedSize,
    steps: Sequence[MeasuredStep],
) -> MeasuredStep | None:
    """The last of these steps, sorted by time, that measured a predicted size after it was
    predicted."""
    job = SizedJob(
        prediction.task,
        prediction.device,
        prediction.batch_per_rank,
        size.nodes,
        size.ranks,
    )
    for step in reversed(steps):
        if step.job == job and step.made_at > prediction.made_at and step.step_s > 0:
            return step

    return None


def _measured_steps(run: Path) -> Iterator[MeasuredStep]:
    """Of its measurements with the batch of each rank unchanged, and of its profile: each is a step of a
    job on some nodes and ranks."""
    for measurement in read_scaling(run, Measurement):
        weak_sizes = [size for size in measurement.sizes if size.scaling == "weak"]
        for size in weak_sizes:
            job = SizedJob(
                measurement.task,
                measurement.device,
                size.batch_size / size.ranks,
                size.nodes,
                size.ranks,
            )
            yield MeasuredStep(measurement.made_at, job, size.step_s, size.run)

    if (run / PROFILE_FOLDER / PROFILE_FILE).is_file():
        profile = read_profile(run)
        batch = None if profile.batch_size is None else profile.batch_size / profile.world_size
        job = SizedJob(profile.task, profile.device, batch, profile.num_nodes, profile.world_size)
        step_s = profile.unprofiled_step_s or profile.step_s
        yield MeasuredStep(profile.made_at, job, step_s, str(run))
