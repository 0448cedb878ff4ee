"""What is compared across ranks, and under which name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drumline.checkpoint.optimizer_state import optimizer_state
from drumline.parallel import replicas
from drumline.parallel.replicas import replica_tensors
from drumline.rank.tensor_hash import as_bytes


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()


def test_optimizer_state_is_seen_once_it_is_there_and_named_as_in_a_checkpoint() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = replica_tensors(model, optimizer, include_buffers=True)
    assert list(before) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    trained(model, optimizer)
    after = replica_tensors(model, optimizer, include_buffers=True)
    assert set(after) - set(before) == set(optimizer_state(model, optimizer)[0])
    assert after["1.bias/exp_avg_sq"] is optimizer.state[model[1].bias]["exp_avg_sq"]


def test_lists_of_tensors_in_optimizer_state_are_seen_and_named_as_in_a_checkpoint() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    tensors = set(replica_tensors(model, optimizer, include_buffers=True)) - {"weight", "bias"}
    assert tensors == set(optimizer_state(model, optimizer)[0])
    assert "weight/old_dirs/0" in tensors


def test_buffers_can_be_left_out() -> None:
    model = small_model()
    tensors = replica_tensors(model, torch.optim.SGD(model.parameters()), include_buffers=False)
    assert list(tensors) == [name for name, _ in model.named_parameters()]


def test_what_ddp_ignores_may_differ_across_ranks() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    model._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]  # type: ignore[assignment]
    tensors = replica_tensors(model, optimizer, include_buffers=True)
    assert not [name for name in tensors if name.startswith(("0.weight", "1.running_mean"))]
    assert "0.bias/exp_avg" in tensors


@pytest.mark.parametrize(
    "damaged",
    [torch.ones(3).cfloat().conj(), torch.ones(3).cfloat().conj().imag, torch.zeros(3, 2)[:, 0]],
    ids=["conjugate", "negative", "column"],
)
def test_a_tensor_that_is_a_view_is_replaced_by_that_of_the_majority(
    damaged: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.arange(1, 4).to(damaged.dtype)

    def broadcast(buffer: torch.Tensor, source: int, group: Any) -> None:
        buffer.copy_(as_bytes(right))

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    replicas._broadcast(damaged, 0, torch.device("cpu"), None)
    assert torch.equal(damaged, right)
