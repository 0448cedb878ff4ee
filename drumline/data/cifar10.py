"""CIFAR-10, and a reader of pickled arrays that executes nothing in the file.

The python version of CIFAR-10 is distributed as pickles, and a pickle is a program: it may call any function, refer to
one value a million times, or allocate any amount of memory. `pickletools` of the standard library splits it into
opcodes without running them; the reader here executes only those that lists, dictionaries, text, numbers and arrays of
integers need, and refuses all others. It imports and calls nothing, and allocates no more memory than the file's size.
"""

from __future__ import annotations

import pickletools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.data.dataset import Split
from drumline.data.images import ImageArrays, Preparation
from drumline.errors import DataError
from drumline.untrusted import read_regular

_TRAIN_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
_EVAL_FILES = ("test_batch",)
_PIXELS = 3 * 32 * 32
_PYTHON_FOLDER, _BINARY_FOLDER = "cifar-10-batches-py", "cifar-10-batches-bin"
_NEXT_STEP = (
    "download cifar-10-python.tar.gz or cifar-10-binary.tar.gz, unpack it, and give the folder as "
    "--data.dir or DATASET_DIR"
)
# The largest file of CIFAR-100 has 155 MB and 300,000 opcodes.
MAX_BYTES = 512 << 20
MAX_OPCODES = 400_000
_INTEGER_TYPE = re.compile(r"[iu][1248]")
_NAMES = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "numpy.core.multiarray._reconstruct": "array",
    "numpy.core.numeric._frombuffer": "whole_array",
    "_codecs.encode": "bytes",
}
# Opcodes whose argument is the value: integers, text and bytes.
_VALUES = {
    *("BININT1", "BININT2", "BININT", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def cifar10(*, split: Split, dir: str | None, augment: bool) -> ImageArrays:
    """CIFAR-10 in its python or binary version: 50,000 + 10,000 images of [3, 32, 32]. `dir` is the folder of its
    files, or the one above. Augmentation: the usual crop with a border of 4 pixels, and mirroring."""
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
            mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7), padding=4 if augment else 0, flip=augment
        ),
    )


def _find_cifar10(folder: Path) -> tuple[Path, str]:
    """The folder with the files, and the suffix of their names: none in the python version, `.bin` in the binary."""
    for candidate in (folder, folder / _PYTHON_FOLDER, folder / _BINARY_FOLDER):
        for suffix in ("", ".bin"):
            if any((candidate / f"{name}{suffix}").is_file() for name in (*_TRAIN_FILES, *_EVAL_FILES)):
                return candidate, suffix
    raise DataError(
        f"there is no CIFAR-10 in {folder}: expected {_PYTHON_FOLDER}/data_batch_1 or "
        f"{_BINARY_FOLDER}/data_batch_1.bin there, or such files in the folder itself",
        next_step=_NEXT_STEP,
    )


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not path.is_file():
        raise DataError(f"{path} is missing; other files of CIFAR-10 are there", next_step=_NEXT_STEP)
    if path.suffix == ".bin":
        size, record = path.stat().st_size, 1 + _PIXELS
        if size == 0 or size % record:
            raise _malformed(path, f"records of {record} bytes, found a size of {size} bytes")
        records = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
        images, labels = records[:, 1:], records[:, 0].astype(np.int64)
    else:
        images, labels = _read_python(path)
    if not (labels.min() >= 0 and labels.max() < 10):
        raise _malformed(path, f"labels from 0 to 9, found {labels.min()} to {labels.max()}")
    return images, labels


def _read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = load_arrays(path)
    if not {"data", "labels"} <= content.keys():
        found = ", ".join(sorted(content)[:10])[:200] or "nothing"
        raise _malformed(path, f"'data' and 'labels', found {found}")
    images: Any = content["data"]
    is_array = isinstance(images, np.ndarray)
    if not (is_array and images.dtype == np.uint8 and images.shape[1:] == (_PIXELS,)):
        found = f"{images.dtype} {images.shape}" if is_array else type(images).__name__
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
        f"{path} is not a valid CIFAR-10 file: expected {expected}",
        next_step="download it again; an interrupted download leaves a shorter file",
    )


def load_arrays(path: Path) -> dict[str, Any]:
    """The dictionary that the file holds, its keys as text, its arrays of integers as numpy arrays."""
    try:
        content = _PickleReader(read_regular(path, most=MAX_BYTES, follow_links=True)).load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dictionary")
        return {
            _text(name): _array(value) if isinstance(value, _PickledObject) else value
            for name, value in content.items()
        }
    except DataError as error:
        raise DataError(f"{path}: {error.what}", next_step=error.next_step) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path} is damaged or not a pickled batch of images ({type(error).__name__}: {error})",
            next_step="download the file again and compare its checksum",
        ) from error


class _PickledName(NamedTuple):
    """A function or class that the file names."""

    kind: str


class _PickledObject:
    """An array or a dtype as the file describes it: its constructor's arguments, and its state."""

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: tuple[Any, ...] = ()


class _PickleReader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def load(self) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._data)):
            if opcode.name == "STOP":
                return self._stack[-1]
            if count == MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES:,} values")
            if opcode.name in _VALUES:
                self._stack.append(argument)
            else:
                self._follow(opcode.name, argument)
        raise EOFError("it has no end")

    def _follow(self, opcode: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match opcode:
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SHORT_BINSTRING" | "BINSTRING":  # bytes of Python 2, which pickletools gives as text
                stack.append(argument.encode("latin-1"))
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._taken(len(stack) - _TUPLES[opcode])))
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._taken(self._marks.pop())))
            case "APPEND" | "APPENDS":
                values = self._taken(len(stack) - 1 if opcode == "APPEND" else self._marks.pop())
                _checked(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self._taken(len(stack) - 2 if opcode == "SETITEM" else self._marks.pop())
                target = _checked(dict, stack[-1])
                for key, value in zip(values[::2], values[1::2], strict=True):
                    # Not any hashable value: hashing nested tuples may take forever.
                    target[_checked((str, bytes), key)] = value
            case "GLOBAL":
                self._name(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                self._name(*self._taken(len(stack) - 2))
            case "REDUCE":
                function, given = self._taken(len(stack) - 2)
                kind, arguments = _checked(_PickledName, function).kind, _checked(tuple, given)
                stack.append(self._bytes(*arguments) if kind == "bytes" else _PickledObject(kind, arguments))
            case "BUILD":
                state = _checked(tuple, stack.pop())
                _checked(_PickledObject, stack[-1]).state = state
            case _:
                raise _refused(f"uses the pickle opcode {opcode}")

    def _taken(self, begin: int) -> list[Any]:
        """Remove and return the values of the stack from there on."""
        if begin < 0:
            raise IndexError("the stack is empty")
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _name(self, module: Any, name: Any) -> None:
        whole = f"{_checked(str, module)}.{_checked(str, name)}"
        if (kind := _NAMES.get(whole.replace("numpy._core.", "numpy.core."))) is None:
            raise _refused(f"asks for {whole[:200]}")
        self._stack.append(_PickledName(kind))

    def _bytes(self, text: Any, encoding: Any) -> bytes:
        """Protocol 2 has no bytes, so Python 3 writes them as text and its encoding."""
        self._encoded += len(_checked(str, text))
        if encoding != "latin1" or self._encoded > len(self._data):
            raise TypeError(f"bytes encoded as {encoding!r}, {self._encoded:,} in all")
        return bytes(text, "latin1")


def _refused(what: str) -> DataError:
    return DataError(
        f"the file {what}, which an array of numbers does not need; no code of it was run",
        next_step="do not trust this file; download it again from its source",
    )


def _checked(kinds: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} where none may be")
    return value


def _array(made: _PickledObject) -> NDArray[Any]:
    if made.kind == "array":
        _, shape, kind, is_fortran, raw = made.state
        order = "F" if is_fortran else "C"
    elif made.kind == "whole_array":
        raw, kind, shape, order = made.arguments[:4]
    else:
        raise TypeError(f"a {made.kind} where an array was expected")
    if order not in ("C", "F"):
        raise TypeError("an array in another memory order")
    array = np.frombuffer(_checked((bytes, bytearray), raw), dtype=_type(_checked(_PickledObject, kind)))
    sizes = [_checked(int, size) for size in _checked(tuple, shape)]
    return array.reshape(sizes, order="F" if order == "F" else "C")


def _type(made: _PickledObject) -> np.dtype[Any]:
    name, order = _text(made.arguments[0]), _text(made.state[1])
    if made.kind != "dtype" or not _INTEGER_TYPE.fullmatch(name) or order not in ("<", ">", "|", "="):
        raise TypeError(f"an array of type {order[:1]}{name[:9]}, where integers were expected")
    return np.dtype(order + name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(_checked(str, value))
