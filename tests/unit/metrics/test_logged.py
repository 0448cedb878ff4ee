"""What may be logged, and the event and the file that it becomes."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.base.errors import UsageError
from drumline.metrics.logged import logged_fields


def logged(value: Any, folder: Path = Path()) -> dict[str, Any]:
    return logged_fields("a/b c", value, step=40, folder=folder)


def pixels_of(png: bytes) -> np.ndarray[Any, Any]:
    """As the PNG specification has it, for files without filters."""
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert (png[:8], depth) == (b"\x89PNG\r\n\x1a\n", 8)
    start = png.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", png[start - 8 : start - 4])
    rows = np.frombuffer(zlib.decompress(png[start : start + size]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape((height, width, 3) if colour == 2 else (height, width))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, 1),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (np.float32(0.25), 0.25),
    ],
)
def test_numbers_and_tensors_with_one_are_scalars(value: Any, number: float) -> None:
    assert logged(value) == {"name": "a/b c", "type": "scalar", "value": number}
    assert type(logged(value)["value"]) is type(number)


def test_text_is_text() -> None:
    assert logged("once upon a time") == {
        "name": "a/b c",
        "type": "text",
        "value": "once upon a time",
    }


GREY = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
COLOUR = np.stack([GREY, GREY[::-1], 255 - GREY], axis=2)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (GREY, GREY),
        (COLOUR, COLOUR),
        (torch.tensor(COLOUR.transpose(2, 0, 1).copy()), COLOUR),
        (torch.tensor(GREY / 255.0), GREY),
        (torch.tensor(GREY)[None], GREY),
        (np.array([[-1.0, 0.5], [2.0, np.nan]]), np.array([[0, 128], [255, 0]])),
    ],
)
def test_an_image_is_a_png_in_the_run_folder(image: Any, expected: Any, tmp_path: Path) -> None:
    event = logged(image, tmp_path)
    assert event == {"name": "a/b c", "type": "image", "path": "media/a-b-c-00000040.png"}
    assert np.array_equal(pixels_of((tmp_path / event["path"]).read_bytes()), expected)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1, 2], "it is a list"),
        (None, "it is a NoneType"),
        (torch.zeros(4), r"it is an array of \[4\] in float32"),
        (np.zeros((2, 2, 4)), r"it is an array of \[2, 2, 4\] in float64"),
        (np.zeros((2, 2), np.int64), r"it is an array of \[2, 2\] in int64"),
        (np.array("x"), "it is a ndarray"),
    ],
)
def test_anything_else_is_refused(value: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"a/b c cannot be logged: {what}\n  try: log a number, text, or an image"
    ):
        logged(value, tmp_path)
    assert not list(tmp_path.iterdir())
