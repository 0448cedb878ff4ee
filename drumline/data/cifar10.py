"""CIFAR-10, read without executing anything in its files.

Its python version is distributed as pickles, and a pickle is a program: it may call any function,
or allocate any amount of memory. `pickletools` of the standard library splits it into opcodes
without running them. Of these the pixels and the labels are taken, in the order of the file;
opcodes and names that CIFAR-10's files do not have are refused.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.base.errors import DataError
from drumline.base.untrusted import read_regular
from drumline.data.dataset import Split
from drumline.data.images import ImageArrays, Preparation

_TRAIN_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
_EVAL_FILES = ("test_batch",)
_PIXELS = 3 * 32 * 32
_PYTHON_FOLDER = "cifar-10-batches-py"
_BINARY_FOLDER = "cifar-10-batches-bin"
_NEXT_STEP = (
    "download cifar-10-python.tar.gz or cifar-10-binary.tar.gz, unpack it, and give the folder as "
    "--data.dir or DATASET_DIR"
)

# A file of CIFAR-10 has 31 MB and 40,000 opcodes.
MAX_BYTES = 64 << 20
MAX_OPCODES = 200_000
_INTEGERS = ("BININT1", "BININT2", "BININT", "LONG1")
_TEXTS = ("SHORT_BINSTRING", "BINSTRING")

# Those that Python 2 wrote.
_OPCODES = {
    *_INTEGERS,
    *_TEXTS,
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
_NAMES = ("numpy ndarray", "numpy dtype", "numpy.core.multiarray _reconstruct")


def cifar10(*, split: Split, dir: str | None, augment: bool) -> ImageArrays:
    """CIFAR-10 in its python or binary version: 50,000 + 10,000 images of [3, 32, 32]. `dir` is the
    folder of its files, or the one above. Augmentation: the usual crop with a border of 4 pixels,
    and mirroring."""
    if dir is None:
        raise DataError("cifar10 needs --data.dir, which is not set", next_step=_NEXT_STEP)

    folder, suffix = _find_cifar10(Path(dir))
    names = _TRAIN_FILES if split == "train" else _EVAL_FILES
    parts = [_read_batch(folder / f"{name}{suffix}") for name in names]

    return ImageArrays(
        np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32),
        np.concatenate([labels for _, labels in parts]),
        num_classes=10,
        # Statistics of the training images: red, green and blue.
        prepare=Preparation(
            mean=(125.3, 123.0, 113.9),
            std=(63.0, 62.1, 66.7),
            padding=4 if augment else 0,
            flip=augment,
        ),
    )


def _find_cifar10(folder: Path) -> tuple[Path, str]:
    """The folder with the files, and the suffix of their names: none in the python version, `.bin`
    in the binary."""
    for candidate in (folder, folder / _PYTHON_FOLDER, folder / _BINARY_FOLDER):
        for suffix in ("", ".bin"):
            if any(
                (candidate / f"{name}{suffix}").is_file() for name in (*_TRAIN_FILES, *_EVAL_FILES)
            ):
                return candidate, suffix

    raise DataError(
        f"there is no CIFAR-10 in {folder}: expected {_PYTHON_FOLDER}/data_batch_1 or "
        f"{_BINARY_FOLDER}/data_batch_1.bin there, or such files in the folder itself",
        next_step=_NEXT_STEP,
    )


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not path.is_file():
        raise DataError(
            f"{path} is missing; other files of CIFAR-10 are there", next_step=_NEXT_STEP
        )

    if path.suffix == ".bin":
        size = path.stat().st_size
        record = 1 + _PIXELS
        if size == 0 or size % record or size > MAX_BYTES:
            expected = f"records of {record} bytes, and {MAX_BYTES:,} bytes at most"
            raise _malformed(path, f"{expected}, found a size of {size} bytes")

        records = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
        images = records[:, 1:]
        labels = records[:, 0].astype(np.int64)
    else:
        images, labels = read_python_batch(path)

    if not (labels.min() >= 0 and labels.max() < 10):
        raise _malformed(path, f"labels from 0 to 9, found {labels.min()} to {labels.max()}")
    return images, labels


def read_python_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pixels are the longest text in the file, the labels are the integers after the name
    `labels`."""
    name = ""
    pixels = ""
    labels: list[int] = []
    is_fortran = False

    try:
        program = pickletools.genops(read_regular(path, most=MAX_BYTES, follow_links=True))
        argument: Any
        for count, (opcode, argument, _) in enumerate(program):
            if count == MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES:,} values")
            if opcode.name not in _OPCODES:
                raise _refused(path, f"uses the pickle opcode {opcode.name}")
            if opcode.name == "GLOBAL" and argument not in _NAMES:
                raise _refused(path, f"asks for {'.'.join(argument.rsplit(' ', 1))[:200]}")

            if opcode.name in _TEXTS:
                name = argument
                pixels = max(pixels, argument, key=len)
            elif opcode.name in _INTEGERS and name == "labels":
                labels.append(argument)
            # The only one that an array has: it is in Fortran's order of memory.
            elif opcode.name == "NEWTRUE":
                is_fortran = True

        numbers = np.array(labels, dtype=np.int64)  # OverflowError for one of 255 bytes
    except DataError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path} is damaged or not a pickled batch of images ({type(error).__name__}: {error})",
            next_step="download the file again and compare its checksum",
        ) from error

    # pickletools gives bytes of Python 2 as text of the same length.
    count, remainder = divmod(len(pixels), _PIXELS)
    if remainder or not 0 < count == len(labels):
        sizes = f"{len(pixels):,} bytes of pixels and {len(labels):,} labels"
        raise _malformed(path, f"images of {_PIXELS} bytes with a label each, found {sizes}")

    images = np.frombuffer(pixels.encode("latin-1"), dtype=np.uint8)
    return images.reshape(count, _PIXELS, order="F" if is_fortran else "C"), numbers


def _malformed(path: Path, expected: str) -> DataError:
    return DataError(
        f"{path} is not a valid CIFAR-10 file: expected {expected}",
        next_step="download it again; an interrupted download leaves a shorter file",
    )


def _refused(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: the file {what}, which CIFAR-10's do not; no code of it was run",
        next_step="do not trust this file; download it again from its source",
    )
