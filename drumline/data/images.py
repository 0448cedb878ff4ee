"""Images as bytes, and how a batch of them is prepared for a model: a random shift and mirror, then
normalization.

The host draws where each image is cropped (`crop_offsets`); torch moves and normalizes the pixels
on their device, in a few calls for the whole batch. A single kernel for this took 18 us instead of
39 on an H200, for 512 images of 32 x 32: it would save 0.4% of their step, and takes two seconds to
load and compile.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from drumline.base.errors import DataError, MissingExtraError
from drumline.data.dataset import Split, TwoPartDataset, empty_rows, gather_rows
from drumline.data.sharding import Draws

_DIGITS = Path(__file__).with_name("files") / "digits.npz"
_IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("eval", "val", "test"),
}
_FOLDER_NEXT_STEP = (
    "lay the images out as DIR/train/CLASS/NAME.png and DIR/eval/CLASS/NAME.png; DIR is "
    "--data.dir or DATASET_DIR"
)
_AUGMENTATION = 0xA06  # the `stream` of its draws
Shape = tuple[int, int, int]  # channels, height and width of an image


class LabelledImages(NamedTuple):
    """A batch as it leaves the host: uint8 [count, channels, height, width] and int64 [count]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How images are normalized and augmented."""

    mean: tuple[float, ...]
    """The mean of each channel, in bytes."""

    std: tuple[float, ...]
    padding: int = 0
    """Augmentation: shift by up to this many pixels; 0 for none."""

    flip: bool = False
    """Augmentation: mirror left and right at random."""


class ImageDataset(TwoPartDataset):
    """Labelled images that are gathered as bytes, then augmented and normalized on the device."""

    def __init__(self, shape: Shape, *, num_classes: int, prepare: Preparation) -> None:
        self.num_classes = num_classes
        self.in_channels = shape[0]
        self._shape = shape
        self._prepare = prepare

    def choose(self, draws: Draws | None) -> Tensor | None:
        if draws is None or not self._prepare.padding:
            return None
        return crop_offsets(draws, self._shape, self._prepare)

    def finish(self, rows: LabelledImages, choices: Tensor | None) -> tuple[Tensor, Tensor]:
        images = rows.images
        if choices is not None:
            images = crop(images, choices, self._prepare)
        return normalize(images, self._prepare.mean, self._prepare.std), rows.labels


class ImageArrays(ImageDataset):
    """Images in memory: uint8 [count, channels, height, width] and int64 [count]."""

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        *,
        num_classes: int,
        prepare: Preparation,
    ) -> None:
        _, channels, height, width = images.shape
        super().__init__((channels, height, width), num_classes=num_classes, prepare=prepare)
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        return LabelledImages(
            gather_rows(self._images, indices, pinned=pinned),
            gather_rows(self._labels, indices, pinned=pinned),
        )


def crop_offsets(draws: Draws, shape: Shape, prepare: Preparation) -> Tensor:
    """For each sample the offset of its upper left pixel in the padded images of `crop`."""
    channels, height, width = shape
    padding = prepare.padding
    chances = draws.uniform(3, stream=_AUGMENTATION)
    down, right = (chances[:, :2] * (2 * padding + 1)).astype(np.int64).T

    count = len(chances)
    wide = width + 2 * padding
    size = channels * (height + 2 * padding) * wide
    offsets = np.arange(0, count * size, size)
    offsets += down * wide

    if prepare.flip:
        mirrored = chances[:, 2] < 0.5
        right[mirrored] = 2 * padding - right[mirrored]
        offsets[mirrored] += count * size  # the mirrored images follow the others

    offsets += right
    return torch.from_numpy(offsets)


def crop(images: Tensor, offsets: Tensor, prepare: Preparation) -> Tensor:
    """Each image, or its mirror image, padded with a black border and cropped at its offset."""
    count, channels, height, width = images.shape
    padding = prepare.padding
    images = images.contiguous()
    sources = torch.stack((images, images.flip(-1))) if prepare.flip else images
    padded = pad(sources, (padding,) * 4)
    shape = (channels, height + 2 * padding, width + 2 * padding)

    # A view with the `width` pixels after every pixel: one index selects a whole row of a crop.
    runs = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    rows = offsets.unsqueeze(1) + _rows_of_a_crop(shape, height, images.device)
    return runs.index_select(0, rows.view(-1)).view(count, channels, height, width)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes as float32, minus the mean of their channel, divided by its standard deviation."""
    middle, spread = _on_device(mean, std, images.device)
    return torch.sub(images, middle).div_(spread)


# Constants are copied to the device once: a copy from pageable memory waits for the device.
@lru_cache(maxsize=32)
def _rows_of_a_crop(padded: Shape, height: int, device: torch.device) -> Tensor:
    """From the corner of a crop to the start of each of its rows, channel by channel."""
    channels, tall, wide = padded
    starts = np.arange(channels)[:, np.newaxis] * (tall * wide) + np.arange(height) * wide
    return torch.from_numpy(starts.reshape(-1)).to(device)


@lru_cache(maxsize=32)
def _on_device(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    statistics = torch.tensor([mean, std]).view(2, -1, 1, 1).to(device)
    return statistics[0], statistics[1]


def digits(*, split: Split, augment: bool) -> ImageArrays:
    """Handwritten digits: 1,797 real images of [1, 8, 8], so that a first run needs no download.
    Every fifth is for evaluation. Augmentation shifts by up to one pixel, without mirroring. Their
    licence is in `files/`."""
    with np.load(_DIGITS, allow_pickle=False) as arrays:
        images = arrays["images"]
        labels = arrays["labels"]

    chosen = (np.arange(len(labels)) % 5 == 0) == (split == "eval")
    return ImageArrays(
        images[chosen][:, np.newaxis],
        labels[chosen].astype(np.int64),
        num_classes=10,
        # Of the training part; pixels go from 0 to 16.
        prepare=Preparation(mean=(4.88,), std=(6.02,), padding=1 if augment else 0),
    )


class ImageFolder(ImageDataset):
    """DIR/train/CLASS/*.png and DIR/eval/CLASS/*.png (or `val`, or `test`), as RGB of a given size;
    classes are numbered in the order of their names. Images are decoded when they are needed: give
    this one DataLoader workers."""

    def __init__(self, *, split: Split, dir: str | None, augment: bool, image_size: int) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise MissingExtraError("the image_folder dataset", extra="images")
        if dir is None:
            raise DataError(
                "image_folder needs --data.dir, which is not set", next_step=_FOLDER_NEXT_STEP
            )

        self.classes = _class_names(_split_folder(Path(dir), "train"))
        self._paths, self._labels = _list_images(_split_folder(Path(dir), split), self.classes)
        self._image_size = image_size

        # The usual statistics of photographs, and the crop of CIFAR-10 in proportion: a border of
        # an eighth.
        padding = max(1, image_size // 8) if augment else 0
        prepare = Preparation(
            mean=(123.7, 116.3, 103.5),
            std=(58.4, 57.1, 57.4),
            padding=padding,
            flip=augment,
        )

        super().__init__(
            (3, image_size, image_size), num_classes=len(self.classes), prepare=prepare
        )

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        images = empty_rows((len(indices), *self._shape), torch.uint8, pinned=pinned)
        for row, index in zip(images.numpy(), indices.tolist(), strict=True):
            row[:] = _decode(self._paths[index], self._image_size)
        return LabelledImages(images, gather_rows(self._labels, indices, pinned=pinned))


def _split_folder(folder: Path, split: Split) -> Path:
    """The folder of this part of the images."""
    candidates = [folder / name for name in _SPLIT_FOLDERS[split]]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate

    expected = " or ".join(map(str, candidates))
    raise DataError(f"there is no folder {expected}", next_step=_FOLDER_NEXT_STEP)


def _class_names(folder: Path) -> list[str]:
    """The folders in it, in the order of their names."""
    folders = [path.name for path in folder.iterdir() if path.is_dir()]
    names = sorted(name for name in folders if not name.startswith("."))
    if not names:
        raise DataError(
            f"{folder} holds no folders: expected one for each class", next_step=_FOLDER_NEXT_STEP
        )
    return names


def _list_images(folder: Path, classes: list[str]) -> tuple[list[Path], NDArray[np.int64]]:
    """The path and the label of each image."""
    paths: list[Path] = []
    labels: list[int] = []
    for name in _class_names(folder):
        if name not in classes:
            raise DataError(
                f"{folder / name} is a class that the training images do not have; they have: {', '.join(classes)}",
                next_step="give it a folder in train/, or remove it",
            )

        # Sorted, because the order in which a file system lists a folder differs from node to node.
        files = sorted((folder / name).rglob("*"))
        images = [path for path in files if path.suffix.lower() in _IMAGE_ENDINGS]
        if not images:
            raise DataError(
                f"{folder / name} holds no images: expected files that end in {', '.join(sorted(_IMAGE_ENDINGS))}",
                next_step="put its images there, or remove the folder",
            )

        paths += images
        labels += [classes.index(name)] * len(images)

    return paths, np.array(labels, dtype=np.int64)


def _decode(path: Path, image_size: int) -> NDArray[np.uint8]:
    """The image as [3, image_size, image_size]."""
    from PIL import Image  # an extra: everything else works without it

    try:
        with Image.open(path) as image:
            size = (image_size, image_size)
            resized = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except Exception as error:
        # Pillow's decoders may raise anything for a damaged file
        raise DataError(
            f"the image {path} cannot be read ({type(error).__name__}: {error})",
            next_step="replace the file or remove it",
        ) from error

    return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
