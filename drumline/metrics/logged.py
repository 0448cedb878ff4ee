"""What `Run.log` and `Task.log` take: a number, an image or text, as the fields of a `logged`
event. An image is written to the run folder as PNG; its event has the path."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from drumline.base.errors import UsageError
from drumline.base.untrusted import make_own_folder, replace_bytes

MEDIA = "media"
_NEXT_STEP = (
    "log a number, text, or an image of HxW, HxWx3 or 3xHxW in uint8 or in floats from 0 to 1"
)


def logged_fields(name: str, value: Any, *, step: int, folder: Path) -> dict[str, Any]:
    """The fields of the event. `folder`: the run's, where an image is written; raises OSError if
    that fails."""
    if isinstance(value, str):
        return {"name": name, "type": "text", "value": value}

    array = _as_array(name, value)
    if array.ndim == 0:
        number = float(array) if array.dtype.kind == "f" else int(array)
        return {"name": name, "type": "scalar", "value": number}

    file_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    path = Path(MEDIA) / f"{file_name}-{step:08d}.png"
    content = encode_png(_as_pixels(name, array))

    make_own_folder(folder / MEDIA)
    replace_bytes(folder / path, content)
    return {"name": name, "type": "image", "path": str(path)}


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of bytes: HxW in grey, HxWx3 in colour."""
    height, width = pixels.shape[:2]
    colour_type = 2 if pixels.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)

    # Each row begins with the number of its filter: 0 is none.
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)

    png = b"\x89PNG\r\n\x1a\n"
    png += _png_chunk(b"IHDR", header)
    png += _png_chunk(b"IDAT", zlib.compress(rows.tobytes()))
    png += _png_chunk(b"IEND", b"")
    return png


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    """A part of the file: its length, kind, content and checksum."""
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Of numbers; a number is one without dimensions."""
    array = value
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        if tensor.is_floating_point():  # numpy has no bfloat16
            tensor = tensor.float()
        array = tensor.numpy()

    if isinstance(array, int | float | np.generic | np.ndarray):
        array = np.asarray(array)
        if array.dtype.kind in "biuf":
            return array

    what = f"{name} cannot be logged: it is a {type(array).__name__}"
    raise UsageError(what, next_step=_NEXT_STEP)


def _as_pixels(name: str, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """HxW or HxWx3 in bytes."""
    pixels = image

    # as torch has it: the channels first
    if image.ndim == 3 and image.shape[0] in (1, 3):
        pixels = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)

    is_grey = pixels.ndim == 2
    is_colour = pixels.ndim == 3 and pixels.shape[2] == 3
    is_image = pixels.size > 0 and (is_grey or is_colour)
    if is_image and pixels.dtype == np.uint8:
        return pixels

    if is_image and pixels.dtype.kind == "f":
        shares: np.ndarray[Any, Any] = np.nan_to_num(pixels).clip(0.0, 1.0)
        return (shares * 255.0).round().astype(np.uint8)

    what = f"{name} cannot be logged: it is an array of {list(image.shape)} in {image.dtype}"
    raise UsageError(what, next_step=_NEXT_STEP)
