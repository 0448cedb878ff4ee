from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.checkpoint.state import capture, load_checkpoint
from drumline.runs.manifest import CorruptCheckpointError


def save(
    run: Path, step: int, *, with_optimizer: bool = True
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=step / 10, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    snapshot = capture(model, optimizer if with_optimizer else None, progress={"step": step})
    store.write(
        run / "checkpoints",
        step,
        tensors=snapshot.tensors,
        documents=snapshot.documents,
        metrics={},
    )
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000002"])
def test_a_run_its_checkpoints_or_one_of_them(tmp_path: Path, where: str) -> None:
    save(tmp_path, 1)
    saved, _ = save(tmp_path, 2)
    model = nn.Linear(2, 2)
    assert load_checkpoint(str(tmp_path / where), model) == {"step": 2}
    assert torch.equal(model.weight, saved.weight)


def test_with_the_optimizer(tmp_path: Path) -> None:
    saved, optimizer = save(tmp_path, 3)
    model = nn.Linear(2, 2)
    resumed = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    load_checkpoint(tmp_path, model, resumed)
    assert resumed.param_groups[0]["lr"] == 3 / 10
    momentum = resumed.state[model.weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[saved.weight]["momentum_buffer"])


def test_the_model_is_still_right_when_the_checkpoint_is_gone(tmp_path: Path) -> None:
    saved, optimizer = save(tmp_path, 1)
    model = nn.Linear(2, 2)
    resumed = torch.optim.SGD(model.parameters(), momentum=0.9)
    load_checkpoint(tmp_path, model, resumed)
    for file in (tmp_path / "checkpoints" / "step-00000001").iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert torch.equal(model.weight, saved.weight)
    momentum = resumed.state[model.weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[saved.weight]["momentum_buffer"])


def test_a_corrupt_one_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-00000002" / "model.json").unlink()
    assert load_checkpoint(tmp_path, nn.Linear(2, 2)) == {"step": 1}
    skipped = tmp_path / "checkpoints" / "step-00000002"
    assert caplog.messages == [f"the checkpoint {skipped} was skipped: model.json is missing"]


def test_one_that_is_not_finite_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoints"
    snapshot = capture(nn.Linear(2, 2), None, progress={"step": 1})
    tensors = snapshot.tensors
    documents = snapshot.documents
    store.write(
        path, 1, tensors=tensors, documents=documents, metrics={}, non_finite="model/weight"
    )
    for folder in (tmp_path, path / "step-00000001"):
        load_checkpoint(folder, nn.Linear(2, 2))
    assert (
        caplog.messages
        == [f"the checkpoint {path / 'step-00000001'} is loaded, though model/weight is not finite"]
        * 2
    )


def test_a_corrupt_one_asked_for_by_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-00000001"
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        CorruptCheckpointError,
        match=r"is corrupt or incomplete: model\.safetensors: its checksum differs",
    ):
        load_checkpoint(path, nn.Linear(2, 2))
    (path / "model.json").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"is corrupt or incomplete: model\.json is missing"
    ):
        load_checkpoint(path, nn.Linear(2, 2))
    (path / "manifest.json").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"is corrupt or incomplete: manifest\.json is missing"
    ):
        load_checkpoint(path, nn.Linear(2, 2))


def test_one_that_was_copied_under_another_name(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-00000004").rename(tmp_path / "best")
    assert load_checkpoint(tmp_path / "best", nn.Linear(2, 2)) == {"step": 4}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"there is no folder {tmp_path}/none \(looked in .*\)\n  try: give"
    ):
        load_checkpoint(tmp_path / "none", nn.Linear(2, 2))


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"there is no complete checkpoint in {tmp_path}\n  try: give a run"
    ):
        load_checkpoint(tmp_path, nn.Linear(2, 2))


def test_only_corrupt_ones(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "model.json").unlink()
    text = (
        f"there is no complete checkpoint in {tmp_path}\n"
        "  - step-00000001 is corrupt or incomplete: model.json is missing\n  try:"
    )
    with pytest.raises(CheckpointError, match=re.escape(text)):
        load_checkpoint(tmp_path, nn.Linear(2, 2))


def test_another_model(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="the checkpoint is of another model"):
        load_checkpoint(tmp_path, nn.Linear(2, 3))


def test_no_optimizer_in_it(tmp_path: Path) -> None:
    save(tmp_path, 1, with_optimizer=False)
    model = nn.Linear(2, 2)
    assert load_checkpoint(tmp_path, model) == {"step": 1}
    with pytest.raises(CheckpointError, match="the checkpoint holds no optimizer state"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
