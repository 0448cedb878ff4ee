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
    path = Path(MEDIA) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{step:08d}.png"
    content = encode_png(_as_pixels(name, array))
    make_own_folder(folder / MEDIA)
    replace_bytes(folder / path, content)
    return {"name": name, "type": "image", "path": str(path)}


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of bytes: HxW in grey, HxWx3 in colour."""
    height, width = pixels.shape[:2]
    # Each row begins with the number of its filter: 0 is none.
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        # numpy has no bfloat16.
        value = plain.float().numpy() if plain.is_floating_point() else plain.numpy()
    is_known = isinstance(value, bool | int | float | np.generic | np.ndarray)
    array = np.asarray(value) if is_known else None
    if array is None or array.dtype.kind not in "biuf":
        raise UsageError(
            f"{name} cannot be logged: it is a {type(value).__name__}", next_step=_NEXT_STEP
        )
    return array


def _as_pixels(name: str, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pixels = image
    if image.ndim == 3 and image.shape[0] in (1, 3):  # as torch has it: the channels first
        pixels = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)
    is_image = pixels.size > 0 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3))
    if not is_image or (pixels.dtype != np.uint8 and pixels.dtype.kind != "f"):
        shape = f"an array of {list(image.shape)} in {image.dtype}"
        raise UsageError(f"{name} cannot be logged: it is {shape}", next_step=_NEXT_STEP)
    if pixels.dtype.kind == "f":
        pixels = (np.nan_to_num(pixels).clip(0.0, 1.0) * 255.0).round().astype(np.uint8)
    return pixels
