"""Images in a folder for each class: DIR/train/CLASS/*.png and DIR/eval/CLASS/*.png (or `val`, or `test`).

Images are decoded when they are needed, so this is the dataset to give DataLoader workers to.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.dataset import Split, TwoPartDataset
from drumline.data.draws import Draws
from drumline.data.image_arrays import LabelledImages, Preparation
from drumline.errors import DataError, MissingExtraError

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}
_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "eval": ("eval", "val", "test")}
# The usual statistics of photographs, red, green and blue, in bytes.
_MEAN, _STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
_NEXT_STEP = (
    "lay the images out as DIR/train/CLASS/NAME.png and DIR/eval/CLASS/NAME.png; "
    "DIR is --data.dir or DATASET_DIR"
)


class ImageFolder(TwoPartDataset):
    """One part of the images, as RGB of a given size; classes are numbered in the order of their names."""

    in_channels = 3

    def __init__(self, *, split: Split, dir: str | None, augment: bool, image_size: int) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise MissingExtraError("the image_folder dataset", extra="images")
        if dir is None:
            raise DataError("image_folder needs to know where its images are", next_step=_NEXT_STEP)
        self.classes = _class_names(_split_folder(Path(dir), "train"))
        self.num_classes = len(self.classes)
        self._paths, self._labels = _list_images(_split_folder(Path(dir), split), self.classes)
        self._image_size = image_size
        # The crop of CIFAR-10, in proportion: a border of an eighth.
        padding = max(1, image_size // 8) if augment else 0
        self._prepare = Preparation(mean=_MEAN, std=_STD, padding=padding, flip=augment)

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        images = np.stack([_decode(self._paths[index], self._image_size) for index in indices.tolist()])
        return LabelledImages(torch.from_numpy(images), torch.from_numpy(self._labels[indices]))

    def choose(self, draws: Draws | None) -> Tensor | None:
        return self._prepare.choose(draws, (self.in_channels, self._image_size, self._image_size))

    def finish(self, rows: LabelledImages, choices: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._prepare.finish(rows, choices)


def _split_folder(folder: Path, split: Split) -> Path:
    candidates = [folder / name for name in _FOLDERS[split]]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    expected = " or ".join(str(candidate) for candidate in candidates)
    raise DataError(f"there is no folder {expected}", next_step=_NEXT_STEP)


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError(f"{folder} holds no folders: expected one for each class", next_step=_NEXT_STEP)
    return names


def _list_images(folder: Path, classes: list[str]) -> tuple[list[Path], NDArray[np.int64]]:
    paths: list[Path] = []
    labels: list[int] = []
    for name in _class_names(folder):
        if name not in classes:
            raise DataError(
                f"{folder / name} is a class that the training images do not have; they have: {', '.join(classes)}",
                next_step="give it a folder in train/, or remove it",
            )
        # Sorted, because the order in which a file system lists a folder differs from node to node.
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in _ENDINGS)
        if not found:
            raise DataError(
                f"{folder / name} holds no images: expected files that end in {', '.join(sorted(_ENDINGS))}",
                next_step="put its images there, or remove the folder",
            )
        paths += found
        labels += [classes.index(name)] * len(found)
    return paths, np.array(labels, dtype=np.int64)


def _decode(path: Path, image_size: int) -> NDArray[np.uint8]:
    from PIL import Image  # an extra: the rest of the house works without it

    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise whatever the damage makes them trip over
        raise DataError(
            f"the image {path} cannot be read ({type(error).__name__}: {error})",
            next_step="replace the file or remove it",
        ) from error
    return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
