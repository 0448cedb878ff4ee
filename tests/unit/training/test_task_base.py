"""The errors for a task without a method, and for a loss that is not a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drumline.base.errors import UsageError
from drumline.config.schema import Config
from drumline.training.tasks import Loss, Task


class Empty(Task):
    """Nothing is defined."""


@pytest.mark.parametrize(
    ("method", "arguments"), [("model", ()), ("train_data", ()), ("loss", (nn.Identity(), None))]
)
def test_what_was_forgotten_is_named_with_its_class(
    method: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(UsageError, match=rf"Empty does not define {method}\(\)") as caught:
        getattr(Empty(Config()), method)(*arguments)

    assert f"add {method}() to Empty: return" in str(caught.value)


def test_the_rest_has_defaults() -> None:
    task = Empty(Config())

    assert task.eval_data() is None
    assert task.report({"loss": 1.0}) == {"loss": 1.0}
    assert (task.optimizer(nn.Identity()), task.schedule(0, 9), task.metrics(), task.training) == (
        None,
        None,
        {},
        True,
    )
    batch = [torch.ones(1)]
    assert task.on_device(batch) is batch
    assert (task.best_metric, task.higher_is_better, task.collate, task.defaults) == (
        "loss",
        False,
        None,
        {},
    )


def test_a_prediction_is_the_models_output_for_the_inputs() -> None:
    model = nn.Tanh()
    inputs = torch.tensor([0.5])
    for batch in (inputs, (inputs, torch.tensor([1])), [inputs]):
        assert torch.equal(Empty(Config()).predict(model, batch), inputs.tanh())
    with pytest.raises(UsageError, match=r"Empty does not define predict\(\)"):
        Empty(Config()).predict(model, {"inputs": inputs})


def test_a_loss_of_sums_is_taken() -> None:
    total = torch.ones(3, requires_grad=True).sum()
    loss = Loss(total, weight=torch.tensor(3), metrics={"accuracy": torch.tensor(2)})

    assert loss.total is total
    assert Loss(total).weight is None
    assert Loss(total).metrics == {}
    assert Loss.mean(total, 3, outputs=(1, 2)).outputs == (1, 2)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"total": torch.ones(4)}, "total"),
        ({"total": torch.tensor(1.0), "weight": torch.ones(4)}, "weight"),
        (
            {"total": torch.tensor(1.0), "metrics": {"accuracy": torch.ones(4)}},
            r"metrics\['accuracy'\]",
        ),
    ],
)
def test_one_number_per_sample_is_no_sum(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"Loss\.{name} has the shape \[4\].*the sum over the batch"
    ) as caught:
        Loss(**fields)

    assert 'reduction="sum"' in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"total": 1.5}, "total is a float"),
        (
            {"total": torch.tensor(1.0), "metrics": {"accuracy": 3}},
            r"metrics\['accuracy'\] is a int",
        ),
    ],
)
def test_a_number_that_left_the_device_is_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=rf"Loss\.{name}, not a tensor") as caught:
        Loss(**fields)

    assert "without .item()" in str(caught.value)
