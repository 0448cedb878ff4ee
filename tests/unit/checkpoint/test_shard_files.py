"""Tensors that several ranks wrote in shards: assembled whole or by rows, and refused with a
gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumline.checkpoint import store
from drumline.checkpoint.shard_files import SHARDS_FILE, ShardedTensors, assemble
from drumline.parallel.shards import Rows
from drumline.runs.manifest import CorruptCheckpointError

WEIGHT = torch.arange(21.0).reshape(7, 3)
PIECES = {
    "w[0:3]": WEIGHT[:3],
    "w[3:6]": WEIGHT[3:6],
    "w[6:7]": WEIGHT[6:],
    "b[0:2]": torch.ones(2),
    "count": torch.tensor(5),
}
SHAPES = {"w": [7, 3]}


def test_whole_tensors_and_any_rows_of_them() -> None:
    tensors = ShardedTensors(PIECES, SHAPES)
    assert set(tensors) == {"w", "b[0:2]", "count"}, (
        "a name with brackets that is no shard stays as it is"
    )
    assert len(tensors) == 3
    assert torch.equal(tensors["w"], WEIGHT)
    assert tensors.shape("w") == WEIGHT.shape
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(tensors.rows("w", Rows(start, stop)), WEIGHT[start:stop]), (
                start,
                stop,
            )
    assert torch.equal(tensors.rows("b[0:2]", Rows(1, 2)), torch.ones(1))


@pytest.mark.parametrize(
    ("changed", "shape", "problem"),
    [
        ({"w[3:6]": None}, [7, 3], "rows 3 to 6 of w are missing or there twice"),
        ({"w[6:7]": None}, [7, 3], "rows 6 to 7 of w are missing"),
        ({"w[2:6]": WEIGHT[2:6]}, [7, 3], "rows 3 to 2 of w are missing or there twice"),
        ({"w[3:6]": WEIGHT[3:5]}, [7, 3], "rows 3 to 6 of w have another shape or type"),
        ({"w[3:6]": WEIGHT[3:6].double()}, [7, 3], "rows 3 to 6 of w have another shape or type"),
        ({}, [7, -3], r"Expected `int` >= 0 - at `\$\[\.\.\.\]\[\.\.\.\]\[1\]`"),
        ({}, [], r"Expected `array` of length >= 1"),
        ({}, "many", "Expected `array`, got `str`"),
    ],
)
def test_gaps_and_nonsense_are_refused(
    changed: dict[str, Tensor | None], shape: Any, problem: str
) -> None:
    stored = {name: tensor for name, tensor in {**PIECES, **changed}.items() if tensor is not None}
    with pytest.raises(ValueError, match=problem):
        assemble({"model": stored}, {"model": {"w": shape}})


def write(root: Path, shapes: Any) -> Path:
    first = {name: PIECES[name] for name in ("w[0:3]", "count")}
    rest = {name: PIECES[name] for name in ("w[3:6]", "w[6:7]")}
    tensors = {"model-part-00000": first, "model-part-00001": rest}
    return store.write(
        root, 1, tensors=tensors, documents={"progress": {}, SHARDS_FILE: shapes}, metrics={}
    )


def test_a_checkpoint_in_shards_is_read_as_any_other(tmp_path: Path) -> None:
    snapshot = store.read(write(tmp_path, {"model": SHAPES}))
    assert torch.equal(snapshot.tensors["model"]["w"], WEIGHT)
    assert snapshot.documents == {"progress": {}}
    only = store.read(tmp_path / "step-00000001", only=("model",))
    assert torch.equal(only.tensors["model"]["w"], WEIGHT)


@pytest.mark.parametrize("shapes", [{"model": {"w": [8, 3]}}, [], {"model": 3}])
def test_a_wrong_document_makes_the_checkpoint_corrupt(tmp_path: Path, shapes: Any) -> None:
    path = write(tmp_path, shapes)
    with pytest.raises(CorruptCheckpointError, match=r"sharded-tensors\.json"):
        store.read(path)
