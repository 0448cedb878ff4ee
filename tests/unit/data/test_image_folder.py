"""Images in class folders: what is found, how it is decoded, and a sentence for each way it can be
wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.base.errors import DataError, MissingExtraError
from drumline.data.images import ImageFolder
from drumline.data.sharding import Draws

COLOURS = {"ant": (200, 10, 10), "bee": (10, 200, 10), "cat": (10, 10, 200)}


def save(path: Path, colour: Any, *, mode: str = "RGB", size: tuple[int, int] = (12, 9)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(3):
            save(tmp_path / "train" / name / f"{number}.png", colour)
        save(tmp_path / "eval" / name / "0.jpg", colour)
    return tmp_path


def build(
    folder: Path | None, *, split: Any = "train", augment: bool = False, image_size: int = 8
) -> ImageFolder:
    return ImageFolder(
        split=split,
        dir=None if folder is None else str(folder),
        augment=augment,
        image_size=image_size,
    )


def pixel(images: torch.Tensor, number: int) -> list[int]:
    mean = torch.tensor([123.7, 116.3, 103.5])
    std = torch.tensor([58.4, 57.1, 57.4])
    return (images[number, :, 4, 4] * std + mean).round().int().tolist()


def test_classes_are_numbered_by_name_and_images_resized(folder: Path) -> None:
    train = build(folder)
    assert len(train) == 9
    assert (train.classes, train.num_classes, train.in_channels) == (["ant", "bee", "cat"], 3, 3)
    images, labels = train.batch(np.array([8, 0, 4]), None)
    assert images.shape == (3, 3, 8, 8)
    assert images.dtype == torch.float32
    assert labels.tolist() == [2, 0, 1]
    assert [pixel(images, number) for number in range(3)] == [
        list(COLOURS[name]) for name in ("cat", "ant", "bee")
    ]


@pytest.mark.parametrize("name", ["eval", "val", "test"])
def test_the_evaluation_folder_has_three_names(folder: Path, name: str) -> None:
    (folder / "eval").rename(folder / name)
    evaluation = build(folder, split="eval")
    assert evaluation.batch(np.arange(3), None)[1].tolist() == [0, 1, 2]


def test_evaluation_may_lack_a_class_and_keeps_the_numbers_of_training(folder: Path) -> None:
    (folder / "eval" / "ant" / "0.jpg").unlink()
    (folder / "eval" / "ant").rmdir()
    evaluation = build(folder, split="eval")
    assert evaluation.num_classes == 3
    assert evaluation.batch(np.arange(2), None)[1].tolist() == [1, 2]


def test_other_modes_become_rgb_and_other_files_are_left_out(folder: Path) -> None:
    save(folder / "train" / "dog" / "grey.PNG", 77, mode="L")
    (folder / "train" / "dog" / "notes.txt").write_text("not an image")
    (folder / "train" / ".cache").mkdir()
    train = build(folder)
    assert len(train) == 10
    assert pixel(train.batch(np.array([9]), None)[0], 0) == [77, 77, 77]


def test_augmentation_is_for_training_only(folder: Path) -> None:
    indices = np.arange(9)
    plain = build(folder)
    augmented = build(folder, augment=True)
    expected = plain.batch(indices, None)[0]
    assert torch.equal(augmented.batch(indices, None)[0], expected)
    assert torch.equal(plain.batch(indices, Draws(0, 0, indices))[0], expected)
    assert not torch.equal(augmented.batch(indices, Draws(0, 0, indices))[0], expected)


def test_an_unreadable_image_is_named(folder: Path) -> None:
    (folder / "train" / "ant" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(DataError, match=r"the image .*train/ant/1.png cannot be read"):
        build(folder).batch(np.arange(3), None)


def test_a_truncated_image_is_named(folder: Path) -> None:
    path = folder / "train" / "bee" / "0.png"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"the image .*train/bee/0.png cannot be read"):
        build(folder).batch(np.arange(9), None)


@pytest.mark.parametrize(
    ("split", "expected"), [("train", "train"), ("eval", r".*eval or .*val or .*test")]
)
def test_a_missing_part_is_reported(folder: Path, split: str, expected: str) -> None:
    (folder / split).rename(folder / "elsewhere")
    with pytest.raises(DataError, match=f"there is no folder .*{expected}") as caught:
        build(folder, split=split)
    assert "DIR/train/CLASS/NAME.png" in str(caught.value)


def test_a_part_without_classes_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train holds no folders: expected one for each class"):
        build(tmp_path)


def test_a_class_without_images_is_reported(folder: Path) -> None:
    (folder / "train" / "dog").mkdir()
    with pytest.raises(
        DataError, match=r"train/dog holds no images: expected files that end in .bmp"
    ):
        build(folder)


def test_a_class_that_training_lacks_is_reported(folder: Path) -> None:
    save(folder / "eval" / "dog" / "0.png", 0)
    with pytest.raises(
        DataError, match=r"eval/dog is a class that the training images do not have.*ant, bee, cat"
    ):
        build(folder, split="eval")


def test_no_folder_at_all_is_reported() -> None:
    with pytest.raises(DataError, match=r"image_folder needs --data.dir, which is not set"):
        build(None)


def test_without_pillow_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError,
        match=r"the image_folder dataset needs a package[\s\S]*pip install 'pillow>=10'",
    ):
        build(folder)
