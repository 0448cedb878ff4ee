"""Meters add up on the device and wait for nothing."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.base.errors import TrainingError
from drumline.metrics.meters import Meter, means

CPU = torch.device("cpu")


def test_sums_are_taken_once() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(6.0), 3, {"correct": torch.tensor(2), "accuracy": torch.tensor(1)})
    meter.add(
        torch.tensor(4.0),
        torch.tensor(2),
        {"accuracy": torch.tensor(1), "correct": torch.tensor(0)},
    )

    assert meter.names == ("accuracy", "correct")
    assert meter.take().tolist() == [10.0, 5.0, 2.0, 2.0]
    assert meter.take().tolist() == [0.0, 0.0, 0.0, 0.0]


def test_what_was_taken_does_not_change_later() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(1.0), 1, {})
    taken = meter.take()

    meter.add(torch.tensor(5.0), 1, {})

    assert taken.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["step", "kind", "number", "lr"])
def test_a_metric_cannot_have_the_name_of_what_an_event_says_itself(name: str) -> None:
    meter = Meter(CPU)
    message = f"(?s)the metric name '{name}' is reserved.*; reserved names: communication_share, .*, tokens_per_s"
    with pytest.raises(TrainingError, match=message):
        meter.add(torch.tensor(1.0), 1, {"accuracy": torch.tensor(1.0), name: torch.tensor(2.0)})


def test_long_sums_lose_nothing() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(2.0**25), 1, {})
    for _ in range(64):
        meter.add(torch.tensor(0.25), 1, {})  # in float32 each of these would vanish

    assert float(meter.take()[0]) == 2.0**25 + 16


def test_the_graph_of_the_loss_is_not_held() -> None:
    meter = Meter(CPU)
    loss = torch.ones(2, requires_grad=True).sum()

    meter.add(loss, 2, {"twice": loss * 2})

    assert not meter.take().requires_grad


@pytest.mark.slow
def test_adding_never_asks_the_device_for_a_number() -> None:
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            assert operation not in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten._to_copy.default,
            )
            return operation(*arguments, **(keywords or {}))

    meter = Meter(CPU)
    loss = torch.tensor(1.5)
    correct = torch.tensor(3)
    with NoReading():
        for weight in (4, torch.tensor(4)):
            meter.add(loss, weight, {"correct": correct})
        sums = meter.take()

    assert sums.tolist() == [3.0, 8.0, 6.0]


def test_a_rank_without_samples_has_the_same_layout() -> None:
    meter = Meter(CPU)

    meter.prepare(["b", "a"])

    assert meter.names == ("a", "b")
    assert meter.take().tolist() == [0.0] * 4


def test_other_metrics_than_before_are_refused() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(1.0), 1, {"accuracy": torch.tensor(1)})

    with pytest.raises(TrainingError, match=r"changed: \['accuracy'\] -> \['recall'\]"):
        meter.add(torch.tensor(1.0), 1, {"recall": torch.tensor(1)})
    with pytest.raises(TrainingError, match=r"changed: \['accuracy'\] -> \[\]"):
        meter.add(torch.tensor(1.0), 1, {})


def test_metrics_that_appear_after_a_loss_without_any_are_refused() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(1.0), 1, {})

    with pytest.raises(TrainingError, match=r"changed: \[\] -> \['accuracy'\]"):
        meter.add(torch.tensor(1.0), 1, {"accuracy": torch.tensor(1)})


def test_means_are_per_unit_of_weight() -> None:
    assert means([6.0, 4.0, 3.0, 2.0], ["accuracy", "recall"]) == {
        "loss": 1.5,
        "accuracy": 0.75,
        "recall": 0.5,
    }


def test_no_weight_has_no_mean() -> None:
    with pytest.raises(TrainingError, match="weights of the samples add up to 0"):
        means([0.0, 0.0], [])
