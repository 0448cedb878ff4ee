"""Reads the numpy arrays of a pickle file without executing anything in it.

The python version of CIFAR-10 is distributed as pickles, and a pickle is a program: it may name any function
and have it called. This reader looks names up in a table of its own (`_STAND_INS`) and nowhere else. The
table holds only inert stand-ins for the names that a pickled array consists of, which note down what they are
given; the arrays are then built from those notes. Any other name is refused before it is even imported, and
so nothing of the file's choosing can run.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.errors import DataError

_INTEGER_TYPE = re.compile(r"[iu][1248]")


def load_arrays(path: Path) -> dict[str, Any]:
    """The dictionary that the file holds, its keys as text, its arrays of integers as numpy arrays."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dictionary")
        return {_text(name): _built(value) for name, value in content.items()}
    except DataError as error:
        raise DataError(f"{path}: {error.what}", next_step=error.next_step) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path} is damaged or is no pickled batch of images ({type(error).__name__}: {error})",
            next_step="download the file again and compare its checksum",
        ) from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise DataError(
                f"the file asks for {module}.{name}, which no array of numbers needs; nothing of it was run",
                next_step="do not trust this file; download it again from its source",
            )
        return _STAND_INS[module, name]


class _Notes:
    """What a pickle said about an array or a type: the arguments it was made with, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Type(_Notes):
    """Stands in for numpy.dtype."""

    def built(self) -> np.dtype[Any]:
        name, order = _text(self.arguments[0]), _text(self.state[1])
        if not _INTEGER_TYPE.fullmatch(name) or order not in "<>|=":
            raise TypeError(f"an array of type {order}{name}, where integers were expected")
        return np.dtype(order + name)


class _Array(_Notes):
    """Stands in for the function that begins an array, which the pickle then gives a state."""

    def built(self) -> NDArray[Any]:
        _, shape, kind, is_fortran, raw = self.state
        return np.frombuffer(_built(raw), dtype=kind.built()).reshape(shape, order="F" if is_fortran else "C")


class _WholeArray(_Notes):
    """Stands in for the function that makes an array in one go, as protocol 5 has it."""

    def built(self) -> NDArray[Any]:
        raw, kind, shape, order = self.arguments[:4]
        if order not in ("C", "F"):
            raise TypeError(f"an array in memory order {order!r}")
        return np.frombuffer(_built(raw), dtype=kind.built()).reshape(shape, order=order)


class _Bytes(_Notes):
    """Stands in for _codecs.encode: protocol 2 has no bytes, so Python 3 writes them as text and its encoding."""

    def built(self) -> bytes:
        text, encoding = self.arguments
        if encoding != "latin1":
            raise TypeError(f"bytes encoded as {encoding!r}")
        return bytes(text, "latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Notes,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _WholeArray,
    ("numpy._core.numeric", "_frombuffer"): _WholeArray,
    ("_codecs", "encode"): _Bytes,
}


def _built(value: Any) -> Any:
    return value.built() if hasattr(value, "built") else value


def _text(value: Any) -> str:
    plain = _built(value)
    return plain.decode() if isinstance(plain, bytes) else str(plain)
