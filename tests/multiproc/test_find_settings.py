"""`find-lr` and `find-batch` on real jobs: the same answer on any number of ranks, and nothing is
left behind."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD

from drumline.base.errors import TrainingError, UsageError
from drumline.config.schema import Config, OptimConfig
from drumline.tools.find.batch_search import BatchSearch, search_batch
from drumline.tools.find.range_test import RangeOptions, RangeTest, measure_range
from drumline.training.job.job import make_manager
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Loss, Task
from tests.jobs import Classify, Normalised, WeighTokens, make_config
from tests.ranks import run_ranks
from tests.stream_jobs import ClassifyStream

OPTIONS = RangeOptions(1e-4, 1e3, 60)
PLAIN = OptimConfig(lr=0.1, weight_decay=0.0, momentum=0.0, warmup_steps=5)


def manager(config: Config) -> RunManager:
    ddp = make_manager(
        replace(config, dist=replace(config.dist, train_timeout_s=30, same_code=False))
    )
    ddp.setup()
    return ddp


def range_here(config: Config, *tasks: type[Task]) -> list[RangeTest]:
    results = []
    for task in tasks:
        ddp = manager(config)
        try:
            results.append(measure_range(config, task, ddp, OPTIONS, note=lambda _: None))
        finally:
            ddp.cleanup()
    return results


def search_here(config: Config, *tasks: type[Task]) -> list[BatchSearch]:
    results = []
    for task in tasks:
        ddp = manager(config)
        try:
            results.append(search_batch(config, task, ddp, margin=0.05))
        finally:
            ddp.cleanup()
    return results


@pytest.mark.soak
@pytest.mark.world_size(2)
def test_the_suggestion_does_not_depend_on_the_number_of_ranks() -> None:
    """In unequal parts and micro-batches."""
    config = make_config(batch_size=31, samples=96, optim=PLAIN, micro_batch_size=5)
    tasks = (Classify, WeighTokens)
    alone = range_here(config, *tasks)
    pairs = run_ranks(2, range_here, config, *tasks)
    assert [pair.losses for pair in pairs[0]] == [pair.losses for pair in pairs[1]]
    assert [one.has_diverged for one in alone] == [True, False]
    for one, two in zip(alone, pairs[0], strict=True):
        # tokens that are predicted from themselves are learned at any rate
        if one.has_diverged:
            assert one.suggestion() == two.suggestion()
        assert len(one.losses) > one.lowest > 5
        assert one.losses[: one.lowest] == pytest.approx(two.losses[: one.lowest], rel=1e-6)


class Recorded(SGD):
    """Keeps the rates of its steps."""

    rates: list[list[float]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rates.append([group["lr"] for group in self.param_groups])
        super().step()


rates_taken: list[list[float]] = []


class TwoRates(Classify):
    """An optimizer of its own, in which one group has a tenth of the rate of the other."""

    def optimizer(self, model: nn.Module) -> Recorded:
        first, *rest = model.parameters()
        made = Recorded([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.2)
        made.rates = rates_taken
        return made


def test_steps_are_taken_at_these_rates_and_groups_keep_their_ratio() -> None:
    (found,) = range_here(make_config(batch_size=32, samples=96, optim=PLAIN), TwoRates)
    assert [high for _, high in rates_taken] == pytest.approx(found.rates)
    assert [low * 10 for low, _ in rates_taken] == pytest.approx(found.rates)
    assert list(found.rates) == [OPTIONS.rate(step) for step in range(len(found.losses))]
    assert found.own_optimizer == "TwoRates.optimizer()"


def test_it_begins_with_the_weights_of_model_init(tmp_path: Path) -> None:
    config = make_config(batch_size=32, samples=96, optim=PLAIN)
    file = tmp_path / "zeros.safetensors"
    save_file(
        {
            name: torch.zeros_like(tensor)
            for name, tensor in Classify(config).model().state_dict().items()
        },
        file,
    )
    (found,) = range_here(replace(config, model=replace(config.model, init=str(file))), Classify)
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-9)


class Limited(Classify):
    """Runs out of memory above a size that differs across ranks."""

    limits = (9, 5)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        if len(batch[0]) > self.limits[int(os.environ.get("RANK", "0"))]:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
            )
        return loss


class Hopeless(Limited):
    limits = (0, 0)


@pytest.mark.world_size(2)
def test_ranks_agree_on_what_fits_on_all_of_them() -> None:
    config = make_config(batch_size=32, samples=96, accumulate=2)
    for (found,) in run_ranks(2, search_here, config, Limited):
        assert [(trial.size, trial.fits) for trial in found.trials] == [
            *((1, True), (2, True), (4, True), (8, False), (6, False), (5, True))
        ]
        assert all((trial.samples_per_s > 0) == trial.fits for trial in found.trials)
        assert (found.limit, found.batch_size, found.measures_memory) == (16, 32, False)


def test_sharded_modes_are_refused() -> None:
    config = make_config(batch_size=32, samples=96)
    config = replace(config, dist=replace(config.dist, mode="fsdp"))
    on_two: Any = SimpleNamespace(world_size=2)
    with pytest.raises(UsageError, match="cannot try batches in mode fsdp on several ranks"):
        search_batch(config, Classify, on_two, margin=0.05)


def test_alone_up_to_the_whole_batch() -> None:
    (found,) = search_here(make_config(batch_size=9, samples=96), Limited)
    assert [trial.size for trial in found.trials] == [1, 2, 4, 8, 9]
    assert all(trial.fits for trial in found.trials)
    # Batchnorm has no statistics for one sample. A dataset may be smaller than the batch.
    (normalised,) = search_here(make_config(batch_size=200, samples=6), Normalised)
    assert [trial.size for trial in normalised.trials] == [2, 4, 6]


def test_a_stream_is_cut_into_smaller_batches() -> None:
    class Measured(ClassifyStream):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
            seen.add(len(batch[0]))
            return super().loss(model, batch)

    seen: set[int] = set()
    search_here(make_config(batch_size=8, steps=2), Measured)
    assert seen == {1, 2, 4, 8}


def test_a_step_that_never_fits_is_an_error() -> None:
    text = r"micro-batches of 1 does not fit in memory\n  try: --model.activation_checkpointing, --train.precision bf16"
    with pytest.raises(TrainingError, match=text):
        search_here(make_config(batch_size=8), Hopeless)


def test_an_error_of_the_task_is_raised_as_it_is() -> None:
    class Wrong(Classify):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
            if len(batch[0]) > 2:
                raise ValueError("label 7 is out of range")
            return super().loss(model, batch)

    with pytest.raises(ValueError, match="label 7 is out of range"):
        search_here(make_config(batch_size=8), Wrong)
