from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.checkpoint.state import capture, restore

PROGRESS = {"step": 3, "cursor": {"epoch": 1, "position": 64}, "facts": {}}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model(torch.full((2, 3), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_scaler(*, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    snapshot = capture(model, optimizer, progress=PROGRESS)
    path = store.write(
        tmp_path, 3, tensors=snapshot.tensors, documents=snapshot.documents, metrics={}
    )
    new_model, resumed = make()
    assert restore(store.read(path), new_model, resumed) == PROGRESS
    train(model, optimizer)
    train(new_model, resumed)
    assert torch.equal(model.weight, new_model.weight)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "progress.json",
    ]


def test_the_scale_of_fp16_is_restored() -> None:
    model, _ = make()
    scaler = make_scaler()
    scaler.scale(torch.ones(1))
    scaler.update(32.0)
    snapshot = capture(model, scaler=scaler, progress={})
    assert json.loads(json.dumps(snapshot.documents["scaler"])) == scaler.state_dict()
    fresh = make_scaler()
    restore(snapshot, model, scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 32.0


@pytest.mark.parametrize("scaler", [None, make_scaler(enabled=False)])
def test_a_run_that_turns_fp16_on_starts_with_a_fresh_scale(
    scaler: torch.amp.GradScaler | None,
) -> None:
    model, _ = make()
    fresh = make_scaler()
    restore(capture(model, scaler=scaler, progress={}), model, scaler=fresh)
    assert fresh.get_scale() == 8.0


def test_a_checkpoint_without_an_optimizer() -> None:
    model, optimizer = make()
    with pytest.raises(
        CheckpointError,
        match="the checkpoint holds no optimizer state\n  try: load the model alone",
    ):
        restore(capture(model, progress={}), model, optimizer)
