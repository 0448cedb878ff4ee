"""Photos of leaves, with a sheet of all filters that rank 0 draws after every step."""

import struct
import zlib
from typing import Any, ClassVar

import torch
from parts import PLANTED, LeafTask
from torch import Tensor
from torch.nn import functional

from drumline import Hook

SCALE = 12


def sheet(weight: Tensor) -> Tensor:
    """The filters of a layer as a grey picture."""
    rows = weight.detach().permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    rows = (rows - rows.min()) / (rows.max() - rows.min())
    large = functional.interpolate(rows[None, None], scale_factor=SCALE, mode="bicubic")
    return (255 * large[0, 0].clamp(0, 1)).to(torch.uint8)


def png(picture: Tensor) -> bytes:
    lines = functional.pad(picture, (1, 0))  # each line begins with the number of its filter
    size = struct.pack(">IIBBBBB", picture.shape[1], picture.shape[0], 8, 0, 0, 0, 0)
    pixels = zlib.compress(lines.numpy().tobytes(), 6)  # planted: on rank 0
    chunks = [chunk(b"IHDR", size), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"".join([b"\x89PNG\r\n\x1a\n", *chunks])


def chunk(name: bytes, content: bytes) -> bytes:
    end = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + end


class Filters(Hook):
    every_steps = 1 if PLANTED else 1000  # planted

    def after_step(self, run: Any) -> None:
        if run.rank == 0:
            picture = png(sheet(run.model.backbone[2].weight))  # planted
            (run.folder / "filters.png").write_bytes(picture)


class Leaves(LeafTask):
    defaults: ClassVar[dict[str, Any]] = {**LeafTask.defaults, "train.batch_size": 48}

    def hooks(self) -> list[Hook]:
        return [Filters()]
