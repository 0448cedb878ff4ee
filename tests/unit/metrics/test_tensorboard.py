"""TensorBoard gets the curves, and is asked for only when it is wanted."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.errors import MissingExtraError
from drumline.metrics.logged import logged_fields
from drumline.metrics.tensorboard import TensorBoard


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"time": 1000.0 + step, "number": 3, "kind": kind, "rank": 0, "host": "a", "step": step, **fields}


def read(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = read(folder)
    return {
        tag: [(scalar.step, round(scalar.value, 4)) for scalar in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_numbers_become_curves_by_step(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board(event("start", 0, total_steps=2))
    board(event("train", 1, loss=0.5, lr=0.1))
    board(event("train", 2, loss=0.25, lr=0.05))
    board(event("evaluation", 2, accuracy=0.75))
    board.close()

    assert curves(tmp_path) == {
        "train/loss": [(1, 0.5), (2, 0.25)],
        "train/lr": [(1, 0.1), (2, 0.05)],
        "evaluation/accuracy": [(2, 0.75)],
    }


def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first(event("train", step, loss=1.0))
    first.close()

    second = TensorBoard(tmp_path)
    second(event("resume", 1, path="checkpoints/step-1"))
    second(event("train", 2, loss=0.5))
    second.close()

    assert curves(tmp_path) == {"train/loss": [(1, 1.0), (2, 0.5)]}


def test_nothing_is_written_before_the_first_number(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board(event("note", 0, message="hello"))
    board.close()

    assert not (tmp_path / "tensorboard").exists()


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(MissingExtraError, match=r"--log\.tensorboard needs a package") as caught:
        TensorBoard(tmp_path)

    assert "drumline[tensorboard]" in str(caught.value)


def test_the_package_is_not_loaded_before_it_is_wanted() -> None:
    code = "import sys, drumline.metrics.tensorboard; assert 'tensorboard' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_hooks_log_is_shown_in_its_kind(tmp_path: Path) -> None:
    fields = logged_fields("digit", np.eye(4), step=1, folder=tmp_path)
    board = TensorBoard(tmp_path / "tensorboard")
    board(event("logged", 1, **fields))
    board(event("logged", 2, name="distance", type="scalar", value=0.5))
    board(event("logged", 2, name="sample", type="text", value="once upon a time"))
    board.close()

    reader = read(tmp_path / "tensorboard")
    (image,) = reader.Images("digit")
    assert (image.step, image.width, image.height) == (1, 4, 4)
    assert image.encoded_image_string == (tmp_path / fields["path"]).read_bytes()
    assert [(one.step, one.value) for one in reader.Scalars("distance")] == [(2, 0.5)]
    (text,) = reader.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val == [b"once upon a time"]
