"""The reasons against capturing a step are found before it is captured, and reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from drumline.training.steps.graph import find_hook, find_uncopyable, host_changes, user_line

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.count = 0
        self.share = float("nan")
        self.history: list[torch.Tensor] = []
        self.counts = {"steps": 0}
        self.average = torch.zeros(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def found(change: Callable[[Net], Any], task: object | None = None) -> list[str]:
    model = Net()
    with host_changes(model, task or object.__new__(Task)) as reasons:
        model(torch.ones(4, 2))
        change(model)
    return reasons


class Task:
    name = "mine"


def replace_a_buffer(model: Net) -> None:
    model.inner[1].running_mean = torch.zeros(2)


def test_a_plain_step_has_nothing_against_it() -> None:
    assert found(lambda model: None) == []
    assert found(lambda model: model.average.add_(1.0)) == []
    shared = torch.ones(2, requires_grad=True)
    assert found(lambda model: setattr(model, "latest", shared * 2)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: random.random(),
            "it draws random numbers on the host (random), and a replayed step",
        ),
        (
            lambda model: np.random.rand(),
            "it draws random numbers on the host (numpy), and a replayed step",
        ),
        (
            lambda model: torch.rand(1),
            "it draws random numbers on the host (torch's CPU generator), and a replayed",
        ),
        (
            lambda model: setattr(model, "count", 1),
            "Net.count changes from step to step (0, then 1)",
        ),
        (
            lambda model: setattr(model.inner[0], "new", "x"),
            "inner.0.new changes from step to step (None, then 'x')",
        ),
        (
            lambda model: model.history.append(torch.ones(1)),
            "Net.history changes from step to step ([], then a list of 1)",
        ),
        (
            lambda model: model.counts.update(steps=1),
            "Net.counts changes from step to step ({'steps': 0}, then {'steps': 1})",
        ),
        (
            lambda model: setattr(model, "average", model.average * 0.9),
            "the tensor Net.average is replaced by another tensor in every step",
        ),
        (
            replace_a_buffer,
            "the buffer inner.1.running_mean is replaced by another tensor in every step",
        ),
    ],
)
def test_what_changes_on_the_host_is_named(change: Callable[[Net], Any], reason: str) -> None:
    [message] = found(change)
    assert message.startswith(reason)


def test_what_the_task_counts_is_seen() -> None:
    task = Task()
    assert found(lambda model: setattr(task, "name", "other"), task) == [
        "Task.name changes from step to step (None, then 'other')"
    ]


@pytest.mark.slow
def test_hooks_are_named() -> None:
    def reason(add: Callable[[Net, SGD], Any]) -> str | None:
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        add(model, optimizer)
        return find_hook(model, optimizer)

    assert reason(lambda model, optimizer: None) is None
    end = "has a hook, which a replayed step would not call"
    assert reason(lambda model, _: model.register_forward_hook(lambda *_: None)) == f"Net {end}"
    assert (
        reason(lambda model, _: model.inner[0].register_full_backward_hook(lambda *_: None))
        == f"inner.0 {end}"
    )
    assert (
        reason(lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None))
        == f"the optimizer {end}"
    )
    gradient = reason(lambda model, _: model.inner[0].weight.register_hook(lambda grad: None))
    assert gradient == f"the gradient of inner.0.weight {end}"
    accumulated = reason(
        lambda model, _: model.inner[0].bias.register_post_accumulate_grad_hook(
            lambda parameter: None
        )
    )
    assert accumulated == f"the gradient of inner.0.bias {end}"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert (
        reason(lambda *_: None)
        == "there is a hook on all modules, which a replayed step would not call"
    )
    handle.remove()


def test_a_batch_of_tensors_and_plain_values_is_fine_and_others_are_named() -> None:
    assert find_uncopyable([torch.ones(2), 3, "text", None, 0.5], CPU) is None
    assert find_uncopyable([torch.ones(2), object()], CPU) == (
        "a batch holds a object, which cannot be copied into captured memory"
    )
    assert find_uncopyable([torch.ones(2, device="meta")], CPU) == (
        "a batch holds a tensor that is not a plain one on cpu (torch.strided, meta)"
    )


def test_the_user_line_an_error_is_the_users() -> None:
    def users_code() -> None:
        torch.ones(2).reshape(3)

    with pytest.raises(RuntimeError) as raised:
        users_code()
    assert user_line(raised.value).startswith(" at test_capture_checks.py:")
