"""Updates that are left out, by the fused optimizers as on a GPU, and on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from drumline.checkpoint.finite import largest
from drumline.metrics.meters import Meter
from drumline.parallel.wrap import LiveBuffers
from drumline.training.job.optimizer import FiniteSteps

CPU = torch.device("cpu")


def fixture(
    kind: type[Optimizer], on_nan: Any, *, waits: bool, fused: bool = True
) -> tuple[nn.Module, Optimizer, FiniteSteps, Meter]:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, fused=fused, **options)
    meter = Meter(CPU)
    finite = FiniteSteps(on_nan, meter, LiveBuffers(model), optimizer, None, waits_for_device=waits)
    return model, optimizer, finite, meter


def take_step(
    model: nn.Module, optimizer: Optimizer, finite: FiniteSteps, factor: float, added: float = 0.0
) -> None:
    finite.begin()
    total = (model(torch.arange(12.0).view(4, 3) * factor) ** 3).sum() + added
    finite.spread(total * 0.25, total).backward()  # type: ignore[no-untyped-call]
    finite.measure(total, 4, {})
    finite.check(model.parameters())
    finite.take_optimizer_step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_skipped_step_leaves_no_trace(kind: type[Optimizer], waits: bool) -> None:
    """Not in weights, buffers, momentum, the optimizer's count of steps or the logged sums: also as
    the first step."""
    states = []
    for factors in ([math.nan, 1.0, math.inf, 2.0], [1.0, 2.0]):
        model, optimizer, finite, meter = fixture(kind, "skip", waits=waits)
        for factor in factors:
            take_step(model, optimizer, finite, factor)
        state_tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        states.append([*model.state_dict().values(), *state_tensors, meter.take()])
        assert finite.counts.tolist() == ([2, 4] if len(factors) == 4 else [0, 0])
    for left, right in zip(*states, strict=True):
        assert torch.equal(left, right)


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradients_are() -> None:
    model, optimizer, finite, _ = fixture(SGD, "skip", waits=True)
    take_step(model, optimizer, finite, 1.0, added=math.nan)
    assert finite.counts.tolist() == [1, 1]
    assert torch.equal(next(model.parameters()), torch.ones(3))


@pytest.mark.parametrize("waits", [True, False])
def test_stop_freezes_the_weights_from_the_first_bad_step_on(waits: bool) -> None:
    model, optimizer, finite, _ = fixture(AdamW, "stop", waits=waits)
    take_step(model, optimizer, finite, 1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for factor in (math.nan, 1.0):
        take_step(model, optimizer, finite, factor)
    assert all(map(torch.equal, before, model.parameters()))
    assert finite.counts.tolist() == [2, 2]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_on_a_gpu_only_skip_waits_for_the_device_where_the_optimizer_is_not_fused(
    on_nan: Any,
) -> None:
    model, optimizer, finite, _ = fixture(SGD, on_nan, waits=True, fused=False)
    take_step(model, optimizer, finite, math.nan)
    assert (
        finite.keeps_weights
        == bool(torch.isfinite(next(model.parameters())).all())
        == (on_nan == "skip")
    )


def test_the_largest_number_of_tensors_of_any_type() -> None:
    tensors = [
        torch.tensor([1.0, -3.0]),
        torch.empty(0),
        torch.tensor([2.0]).bfloat16(),
        torch.tensor(1e300, dtype=torch.float64),
    ]
    assert largest(tensors) == 1e300
    assert math.isnan(largest([*tensors, torch.tensor(math.nan).half()]))
