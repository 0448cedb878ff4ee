"""Image datasets in files of the user's: CIFAR-10, and a folder of images for each class."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.array_pickle import load_arrays
from drumline.data.dataset import Split
from drumline.data.images import ImageArrays, ImageDataset, LabelledImages, Preparation
from drumline.errors import DataError, MissingExtraError

_CIFAR_FILES: dict[Split, list[str]] = {
    "train": [f"data_batch_{number}" for number in range(1, 6)],
    "eval": ["test_batch"],
}
_CIFAR_PIXELS = 3 * 32 * 32
_PYTHON_FOLDER, _BINARY_FOLDER = "cifar-10-batches-py", "cifar-10-batches-bin"
_CIFAR_NEXT_STEP = (
    "download cifar-10-python.tar.gz or cifar-10-binary.tar.gz, unpack it, and give the folder as "
    "--data.dir or DATASET_DIR"
)
_IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "eval": ("eval", "val", "test")}
_FOLDER_NEXT_STEP = (
    "lay the images out as DIR/train/CLASS/NAME.png and DIR/eval/CLASS/NAME.png; DIR is --data.dir or DATASET_DIR"
)


def cifar10(*, split: Split, dir: str | None, augment: bool) -> ImageArrays:
    """CIFAR-10 in its python or binary version: 50,000 + 10,000 images of [3, 32, 32]. `dir` is the folder of its
    files, or the one above. Augmentation: the usual crop with a border of 4 pixels, and mirroring."""
    if dir is None:
        raise DataError("cifar10 needs --data.dir, which is not set", next_step=_CIFAR_NEXT_STEP)
    folder, suffix = _find_cifar10(Path(dir))
    parts = [_read_batch(folder / f"{name}{suffix}") for name in _CIFAR_FILES[split]]
    return ImageArrays(
        np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32),
        np.concatenate([labels for _, labels in parts]),
        num_classes=10,
        # Of the training images: red, green and blue.
        prepare=Preparation(
            mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7), padding=4 if augment else 0, flip=augment
        ),
    )


def _find_cifar10(folder: Path) -> tuple[Path, str]:
    """The folder with the files, and the suffix of their names: none in the python version, `.bin` in the binary."""
    names = [name for names in _CIFAR_FILES.values() for name in names]
    for candidate in (folder, folder / _PYTHON_FOLDER, folder / _BINARY_FOLDER):
        for suffix in ("", ".bin"):
            if any((candidate / f"{name}{suffix}").is_file() for name in names):
                return candidate, suffix
    raise DataError(
        f"there is no CIFAR-10 in {folder}: expected {_PYTHON_FOLDER}/data_batch_1 or "
        f"{_BINARY_FOLDER}/data_batch_1.bin there, or such files in the folder itself",
        next_step=_CIFAR_NEXT_STEP,
    )


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not path.is_file():
        raise DataError(f"{path} is missing; other files of CIFAR-10 are there", next_step=_CIFAR_NEXT_STEP)
    images, labels = _read_binary(path) if path.suffix == ".bin" else _read_python(path)
    if not (labels.min() >= 0 and labels.max() < 10):
        raise _malformed(path, f"labels from 0 to 9, found {labels.min()} to {labels.max()}")
    return images, labels


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    size, record = path.stat().st_size, 1 + _CIFAR_PIXELS
    if size == 0 or size % record:
        raise _malformed(path, f"records of {record} bytes, found a size of {size} bytes")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = load_arrays(path)
    if not {"data", "labels"} <= content.keys():
        found = ", ".join(sorted(content)[:10])[:200] or "nothing"
        raise _malformed(path, f"'data' and 'labels', found {found}")
    images: Any = content["data"]
    is_array = isinstance(images, np.ndarray)
    if not (is_array and images.dtype == np.uint8 and images.shape[1:] == (_CIFAR_PIXELS,)):
        found = f"{images.dtype} {images.shape}" if is_array else type(images).__name__
        raise _malformed(path, f"images as uint8 [count, {_CIFAR_PIXELS}], found {found}")
    try:
        given = content["labels"]
        if isinstance(given, list) and not all(type(label) is int for label in given):
            raise TypeError("nested lists that refer to each other may take any amount of memory")
        labels = np.asarray(given, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise _malformed(path, "labels that are integers") from error
    if len(labels) != len(images) or len(images) == 0:
        raise _malformed(path, f"a label for each image, found {len(images)} images and {len(labels)} labels")
    return images, labels


def _malformed(path: Path, expected: str) -> DataError:
    return DataError(
        f"{path} is not a valid CIFAR-10 file: expected {expected}",
        next_step="download it again; an interrupted download leaves a shorter file",
    )


class ImageFolder(ImageDataset):
    """DIR/train/CLASS/*.png and DIR/eval/CLASS/*.png (or `val`, or `test`), as RGB of a given size; classes are
    numbered in the order of their names. Images are decoded when they are needed: give this one DataLoader workers."""

    def __init__(self, *, split: Split, dir: str | None, augment: bool, image_size: int) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise MissingExtraError("the image_folder dataset", extra="images")
        if dir is None:
            raise DataError("image_folder needs --data.dir, which is not set", next_step=_FOLDER_NEXT_STEP)
        self.classes = _class_names(_split_folder(Path(dir), "train"))
        self._paths, self._labels = _list_images(_split_folder(Path(dir), split), self.classes)
        self._image_size = image_size
        # The usual statistics of photographs, and the crop of CIFAR-10 in proportion: a border of an eighth.
        padding = max(1, image_size // 8) if augment else 0
        prepare = Preparation(mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4), padding=padding, flip=augment)
        super().__init__((3, image_size, image_size), num_classes=len(self.classes), prepare=prepare)

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        images = np.stack([_decode(self._paths[index], self._image_size) for index in indices.tolist()])
        return LabelledImages(torch.from_numpy(images), torch.from_numpy(self._labels[indices]))


def _split_folder(folder: Path, split: Split) -> Path:
    candidates = [folder / name for name in _SPLIT_FOLDERS[split]]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    expected = " or ".join(str(candidate) for candidate in candidates)
    raise DataError(f"there is no folder {expected}", next_step=_FOLDER_NEXT_STEP)


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError(f"{folder} holds no folders: expected one for each class", next_step=_FOLDER_NEXT_STEP)
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
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in _IMAGE_ENDINGS)
        if not found:
            raise DataError(
                f"{folder / name} holds no images: expected files that end in {', '.join(sorted(_IMAGE_ENDINGS))}",
                next_step="put its images there, or remove the folder",
            )
        paths += found
        labels += [classes.index(name)] * len(found)
    return paths, np.array(labels, dtype=np.int64)


def _decode(path: Path, image_size: int) -> NDArray[np.uint8]:
    from PIL import Image  # an extra: everything else works without it

    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise whatever the damage makes them trip over
        raise DataError(
            f"the image {path} cannot be read ({type(error).__name__}: {error})",
            next_step="replace the file or remove it",
        ) from error
    return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
