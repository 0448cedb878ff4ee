"""The last checkpoints of two runs, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drumline.checkpoint import store
from drumline.tools.prove.prove import compare_checkpoints

NAN = float("nan")


def checkpoint(root: Path, *, world: int = 2, cursor: int = 7, **tensors: list[float]) -> Path:
    weights: dict[str, Tensor] = {"a": torch.tensor([1.0, NAN]), "b": torch.zeros(3)}
    changed = {name: torch.tensor(values) for name, values in tensors.items() if name in weights}
    rng = {f"rank-{rank:05d}": torch.tensor(tensors.get("rng", [1.0])) for rank in range(world)}
    return store.write(
        root,
        8,
        tensors={"model": weights | changed, "rng": rng},
        documents={"progress": {"step": 8, "cursor": cursor, "facts": {"world_size": world}}},
        metrics={},
    )


def test_the_same_files_are_the_same(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "1")
    two = checkpoint(tmp_path / "2")
    assert compare_checkpoints(first, two, 8, same_world=True) is None


def test_on_another_world_the_random_states_are_others(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "1")
    two = checkpoint(tmp_path / "2", world=3)
    assert compare_checkpoints(first, two, 8, same_world=False) is None
    differences = compare_checkpoints(first, two, 8, same_world=True)
    assert differences is not None
    assert differences.sentence == "rng.safetensors of the checkpoint of step 8 differs"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"b": [0.0, 0.0, -0.0]}, "model.safetensors of the checkpoint of step 8 differs"),
        ({"rng": [2.0]}, "rng.safetensors of the checkpoint of step 8 differs"),
        ({"cursor": 9}, "progress.json of the checkpoint of step 8 differs"),
    ],
)
def test_one_bit_is_found_and_named(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    first = checkpoint(tmp_path / "1")
    two = checkpoint(tmp_path / "2", **change)
    differences = compare_checkpoints(first, two, 8, same_world=True)
    assert differences is not None
    assert (differences.kind, differences.sentence) == ("file", sentence)


def test_a_file_that_only_one_has(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "1")
    two = checkpoint(tmp_path / "2")
    (two / "scaler.json").write_text("{}")
    differences = compare_checkpoints(first, two, 8, same_world=True)
    assert differences is not None
    assert differences.sentence == "scaler.json of the checkpoint of step 8 differs"
