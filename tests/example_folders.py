"""The data that examples read from folders, made small."""

from __future__ import annotations

import io
import runpy
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from drumline.data.images import digits

EXAMPLES = Path(__file__).parents[1] / "examples"


def make_images(folder: Path) -> None:
    """Some of the bundled digits as image files, in a folder for each class."""
    counts: dict[Literal["train", "eval"], int] = {"train": 800, "eval": 200}
    for split, count in counts.items():
        rows = digits(split=split, augment=False).gather(np.arange(count))
        for number, (image, label) in enumerate(
            zip(rows.images.numpy() * 15, rows.labels.tolist(), strict=True)
        ):
            file = folder / "images" / split / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(file)


def make_shards(folder: Path) -> None:
    """Points of the spirals as tar files: four for training, one for evaluation."""
    spirals = runpy.run_path(str(EXAMPLES / "spirals.py"))["spirals"]
    shards = folder / "shards"
    shards.mkdir()
    for seed, name in enumerate(["train-0", "train-1", "train-2", "train-3", "eval-0"]):
        with tarfile.open(shards / f"{name}.tar", "w") as tar:
            for number, (point, arm) in enumerate(spirals(500, seed=seed)):
                array = io.BytesIO()
                np.save(array, point.numpy())
                for ending, content in (("npy", array.getvalue()), ("cls", str(int(arm)).encode())):
                    entry = tarfile.TarInfo(f"{number:05}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


MAKERS = {"image_folder.py": make_images, "web_dataset.py": make_shards}
"""By the name of an example: what makes the files that it reads, in the current folder."""
