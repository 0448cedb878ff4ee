"""Compares earlier predictions with what was measured since, by `scale measure` or a profile. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from drumline.errors import UsageError
from drumline.scale.profile_result import PROFILE_FILE, ProfileResult, read_profile
from drumline.scale.scaling_result import Measurement, PredictedSize, Prediction, read_scaling
from drumline.watch.profile_files import PROFILE_FOLDER


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The step of a job, wherever it was measured."""

    task: str
    device: str
    nodes: int
    ranks: int
    batch_per_rank: float | None
    step_s: float
    made_at: float
    run: str


@dataclass(frozen=True, kw_only=True)
class CheckedSize:
    """A prediction, and what was measured."""

    task: str
    network: str
    nodes: int
    ranks: int
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    run: str

    @property
    def error(self) -> float:
        """Positive: predicted too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_within(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """All predictions of some runs that were measured since."""

    checked: tuple[CheckedSize, ...]
    unmeasured: int
    """How many predicted sizes were not measured."""

    @property
    def mean_error(self) -> float:
        return fmean(abs(one.error) for one in self.checked)

    @property
    def worst_error(self) -> float:
        return max(abs(one.error) for one in self.checked)


def check_predictions(runs: Sequence[Path]) -> PredictionCheck:
    """A prediction is compared with the newest measurement of the same task, device, batch and ranks that is newer."""
    predictions = [found for run in runs for found in read_scaling(run, Prediction)]
    if not predictions:
        raise UsageError(
            f"there is no prediction in {', '.join(map(str, runs))}",
            next_step="make one: drumline scale predict RUN --nodes 2,8 --network 100gbit",
        )
    steps = sorted((step for run in runs for step in measured_steps(run)), key=lambda step: step.made_at)
    pairs = [(one, size, _measured(one, size, steps)) for one in predictions for size in one.sizes]
    checked = tuple(
        CheckedSize(
            task=one.task,
            network=one.network,
            nodes=size.nodes,
            ranks=size.ranks,
            predicted_s=size.step_s,
            low_s=size.low_step_s,
            high_s=size.high_step_s,
            measured_s=step.step_s,
            run=step.run,
        )
        for one, size, step in pairs
        if step is not None
    )
    return PredictionCheck(checked=checked, unmeasured=len(pairs) - len(checked))


def measured_steps(run: Path) -> Iterator[MeasuredStep]:
    """Of its measurements with the batch of each rank unchanged, and of its profile."""
    for found in read_scaling(run, Measurement):
        for size in found.sizes:
            if size.scaling == "weak":
                yield MeasuredStep(
                    task=found.task,
                    device=found.device,
                    nodes=size.nodes,
                    ranks=size.ranks,
                    batch_per_rank=None if size.batch_size is None else size.batch_size / size.ranks,
                    step_s=size.step_s,
                    made_at=found.made_at,
                    run=size.run,
                )
    file = run / PROFILE_FOLDER / PROFILE_FILE
    if file.is_file():
        yield of_profile(read_profile(run), made_at=file.stat().st_mtime, run=str(run))


def of_profile(profile: ProfileResult, *, made_at: float, run: str) -> MeasuredStep:
    return MeasuredStep(
        task=profile.task,
        device=profile.device,
        nodes=profile.num_nodes,
        ranks=profile.world_size,
        batch_per_rank=None if profile.batch_size is None else profile.batch_size / profile.world_size,
        step_s=profile.unprofiled_step_s or profile.step_s,
        made_at=made_at,
        run=run,
    )


def _measured(prediction: Prediction, size: PredictedSize, steps: Sequence[MeasuredStep]) -> MeasuredStep | None:
    job = (prediction.task, prediction.device, prediction.batch_per_rank, size.nodes, size.ranks)
    found = [
        step
        for step in steps
        if (step.task, step.device, step.batch_per_rank, step.nodes, step.ranks) == job
        and step.made_at > prediction.made_at
        and step.step_s > 0
    ]
    return found[-1] if found else None
