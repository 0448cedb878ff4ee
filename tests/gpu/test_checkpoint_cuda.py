"""Checkpoints across devices: saved on a GPU and loaded on the CPU, and the other way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from drumline.checkpoint import store
from drumline.checkpoint.state import capture, load_checkpoint, restore
from drumline.rank.determinism import RNG_BYTES, capture_rng, restore_rng

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def make(device: torch.device, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(device)
    return model, AdamW(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: Optimizer, *, steps: int = 3) -> None:
    device = next(model.parameters()).device
    for step in range(steps):
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def save(root: Path, model: nn.Module, optimizer: Optimizer, **extra: Any) -> Path:
    snapshot = capture(model, optimizer, progress={"step": 3}, **extra)
    return store.write(root, 3, tensors=snapshot.tensors, documents=snapshot.documents, metrics={})


OPTIONS: list[dict[str, Any]] = [{"foreach": False}, {}, {"fused": True}, {"capturable": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_continues_bit_for_bit_on_the_gpu(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = make(GPU, **options)
    train(model, optimizer)
    path = save(tmp_path, model, optimizer)
    other, resumed = make(GPU, **options)
    assert load_checkpoint(path, other, resumed) == {"step": 3}
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[left].items():
            assert resumed.state[right][key].device == value.device, key
            assert resumed.state[right][key].dtype == value.dtype, key
    train(model, optimizer)
    train(other, resumed)
    for left, right in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("source", "target"), [(GPU, CPU), (CPU, GPU)], ids=["to_cpu", "to_gpu"])
def test_moves_to_the_other_device(
    tmp_path: Path, source: torch.device, target: torch.device, options: dict[str, Any]
) -> None:
    gpu_only = {} if "capturable" in options else options
    model, optimizer = make(source, **(options if source == GPU else gpu_only))
    train(model, optimizer)
    path = save(tmp_path, model, optimizer)
    other, resumed = make(target, **(options if target == GPU else gpu_only))
    load_checkpoint(path, other, resumed)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert right.device == target
        assert torch.equal(left.cpu(), right.cpu())
        state = resumed.state[right]
        assert state["exp_avg"].device == target
        assert state["step"].item() == 3
        assert torch.equal(optimizer.state[left]["exp_avg"].cpu(), state["exp_avg"].cpu())
    train(other, resumed)


def test_from_tensors_that_a_collective_left_on_the_gpu() -> None:
    model, optimizer = make(GPU)
    train(model, optimizer)
    other, resumed = make(GPU)
    snapshot = capture(model, optimizer, progress={})
    on_gpu = {
        name: {key: t.to(GPU) for key, t in group.items()}
        for name, group in snapshot.tensors.items()
    }
    restore(store.Snapshot(on_gpu, snapshot.documents), other, resumed)
    assert resumed.state[next(other.parameters())]["step"].device == CPU
    train(model, optimizer)
    train(other, resumed)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_rate_on_the_gpu_stays_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).to(GPU)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5, device=GPU), capturable=True)
    path = save(tmp_path, model, optimizer)
    resumed = AdamW(model.parameters(), lr=torch.tensor(0.1, device=GPU), capturable=True)
    load_checkpoint(path, model, resumed)
    rate = resumed.param_groups[0]["lr"]
    assert (rate.item(), rate.device) == (0.5, GPU)


def test_the_scale_of_fp16_continues(tmp_path: Path) -> None:
    model, optimizer = make(GPU)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 8), float(step), device=GPU)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    path = save(tmp_path, model, optimizer, scaler=scaler)
    fresh = torch.amp.GradScaler("cuda")
    restore(store.read(path), *make(GPU), scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() > 2.0**10


def test_the_next_draws_on_the_gpu_are_the_same() -> None:
    torch.cuda.manual_seed(7)
    torch.rand(10, device=GPU)
    state = capture_rng(GPU)
    assert (state.shape, state.device) == ((RNG_BYTES,), CPU)
    expected = [torch.rand(5, device=GPU), torch.randn(5, device=GPU), torch.rand(5)]
    torch.cuda.manual_seed(8)
    torch.manual_seed(9)
    restore_rng(state.to(GPU), GPU)
    drawn = [torch.rand(5, device=GPU), torch.randn(5, device=GPU), torch.rand(5)]
    assert all(torch.equal(a, b) for a, b in zip(expected, drawn, strict=True))


def test_a_gpu_s_random_state_on_the_cpu() -> None:
    state = capture_rng(GPU)
    expected = torch.rand(5)
    restore_rng(state, CPU)
    assert torch.equal(torch.rand(5), expected)
    restore_rng(capture_rng(CPU), GPU)


def test_the_snapshot_of_a_copy_is_the_copy_s(tmp_path: Path) -> None:
    model, optimizer = make(GPU)
    before = copy.deepcopy(model)
    path = save(tmp_path, model, optimizer)
    train(model, optimizer)
    load_checkpoint(path, model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
