"""TensorBoard gets the curves, and is asked for only when it is wanted."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.base.errors import MissingExtraError
from drumline.metrics.logged import encode_png
from drumline.metrics.trackers.tensorboard import TensorBoard
from drumline.metrics.trackers.tracker import Record

PNG = encode_png(np.eye(6, 8, dtype=np.uint8))


def reader_of(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = reader_of(folder)
    return {
        tag: [(scalar.step, round(scalar.value, 4)) for scalar in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def losses(*steps: int, value: float) -> list[Record]:
    return [Record(step, 1000.0 + step, {"train/loss": value}) for step in steps]


def test_numbers_images_and_text_are_shown_by_step(tmp_path: Path) -> None:
    (tmp_path / "digit.png").write_bytes(PNG)
    board = TensorBoard(tmp_path / "board", {"optim.lr": 0.1})
    board.open("abc", resume_step=0)
    board.write(
        [
            Record(1, 1001.0, {"train/loss": 0.5, "train/lr": 0.1}),
            Record(2, 1002.0, {"train/loss": 0.25, "train/lr": 0.05}),
            Record(2, 1002.0, {"evaluation/accuracy": 0.75}),
            Record(2, 1003.0, {"digit": tmp_path / "digit.png"}),
            Record(2, 1004.0, {"poem": "a rose is a rose"}),
        ]
    )
    assert curves(tmp_path / "board") == {
        "train/loss": [(1, 0.5), (2, 0.25)],
        "train/lr": [(1, 0.1), (2, 0.05)],
        "evaluation/accuracy": [(2, 0.75)],
    }, "before it is closed: a kill loses nothing of it"
    board.close("finished")
    reader = reader_of(tmp_path / "board")
    (image,) = reader.Images("digit")
    assert (image.step, image.width, image.height) == (2, 8, 6)
    assert image.encoded_image_string == PNG
    (text,) = reader.Tensors("poem/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"a rose is a rose")
    (config,) = reader.Tensors("config/text_summary")
    assert b"optim.lr = 0.1" in config.tensor_proto.string_val[0]


def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, {})
    first.open("abc", resume_step=0)
    first.write(losses(1, 2, 3, value=1.0))
    first.close("failed")
    second = TensorBoard(tmp_path, {})
    second.open("abc", resume_step=1)
    second.write(losses(2, value=0.5))
    second.close("finished")
    assert curves(tmp_path) == {"train/loss": [(1, 1.0), (2, 0.5)]}


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        MissingExtraError, match=r"--log\.trackers tensorboard needs a package"
    ) as caught:
        TensorBoard(tmp_path, {})
    assert "pip install 'tensorboard>=2.16'" in str(caught.value)


@pytest.mark.soak
def test_no_package_is_loaded_before_it_is_wanted() -> None:
    code = (
        "import sys, drumline.training.output; "
        "assert sys.modules.keys().isdisjoint({'tensorboard', 'wandb', 'mlflow'}), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
