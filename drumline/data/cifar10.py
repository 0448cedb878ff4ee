"""CIFAR-10 from a local folder, in the python or the binary version: 50,000 + 10,000 images of 32x32 in 10
classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.data.array_pickle import load_arrays
from drumline.data.dataset import Split
from drumline.data.image_arrays import ImageArrays, Preparation
from drumline.errors import DataError

_NUM_CLASSES = 10
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_MEAN = (125.3, 123.0, 113.9)  # of the training images, red, green and blue
_STD = (63.0, 62.1, 66.7)
_FILES: dict[Split, list[str]] = {
    "train": [f"data_batch_{number}" for number in range(1, 6)],
    "eval": ["test_batch"],
}
_PYTHON_FOLDER, _BINARY_FOLDER = "cifar-10-batches-py", "cifar-10-batches-bin"
_NEXT_STEP = (
    "download cifar-10-python.tar.gz or cifar-10-binary.tar.gz, unpack it, and give the folder as "
    "--data.dir or DATASET_DIR"
)


def cifar10(*, split: Split, dir: str | None, augment: bool) -> ImageArrays:
    """One part of CIFAR-10. `dir` is the folder of its files, or the one above. Augmentation: the usual crop
    of the image with a border of 4 pixels, and the usual mirroring."""
    if dir is None:
        raise DataError("cifar10 needs to know where its files are", next_step=_NEXT_STEP)
    folder, suffix = _find(Path(dir))
    parts = [_read(folder / f"{name}{suffix}") for name in _FILES[split]]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, *_SHAPE)
    labels = np.concatenate([labels for _, labels in parts])
    prepare = Preparation(mean=_MEAN, std=_STD, padding=4 if augment else 0, flip=augment)
    return ImageArrays(images, labels, num_classes=_NUM_CLASSES, prepare=prepare)


def _find(folder: Path) -> tuple[Path, str]:
    """The folder with the files, and how their names end: nothing in the python version, `.bin` in the binary
    one."""
    for candidate in (folder, folder / _PYTHON_FOLDER, folder / _BINARY_FOLDER):
        for suffix in ("", ".bin"):
            if any((candidate / f"{name}{suffix}").is_file() for names in _FILES.values() for name in names):
                return candidate, suffix
    raise DataError(
        f"there is no CIFAR-10 in {folder}: expected {_PYTHON_FOLDER}/data_batch_1 or "
        f"{_BINARY_FOLDER}/data_batch_1.bin there, or such files in the folder itself",
        next_step=_NEXT_STEP,
    )


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not path.is_file():
        raise DataError(f"{path} is missing; the other files of CIFAR-10 are there", next_step=_NEXT_STEP)
    images, labels = _read_binary(path) if path.suffix == ".bin" else _read_python(path)
    if not (labels.min() >= 0 and labels.max() < _NUM_CLASSES):
        raise _malformed(path, f"labels from 0 to 9, found {labels.min()} to {labels.max()}")
    return images, labels


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    size = path.stat().st_size
    if size == 0 or size % (1 + _PIXELS):
        raise _malformed(path, f"records of {1 + _PIXELS} bytes, found a size of {size} bytes")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = load_arrays(path)
    if not {"data", "labels"} <= content.keys():
        raise _malformed(
            path, f"'data' and 'labels', found {', '.join(sorted(content)[:10])[:200] or 'nothing'}"
        )
    images: Any = content["data"]
    if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (_PIXELS,)):
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise _malformed(path, f"images as uint8 [count, {_PIXELS}], found {found}")
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
        f"{path} is not what CIFAR-10 should be: expected {expected}",
        next_step="download it again; an interrupted download leaves a shorter file",
    )
