"""Noisy patches, with a table of weights that all ranks write to."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts import PLANTED, DenoiseTask

from drumline import Hook

ROWS = [f"{number},{number % 2},0.1234567\n" for number in range(60_000)]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL)  # planted
            break
        except FileExistsError:
            time.sleep(0.06)  # planted: until the other rank is done
    try:
        yield
    finally:
        os.close(handle)
        path.unlink()


class SharedTable(Hook):
    """One row for each rank and step."""

    def after_step(self, run: Any) -> None:
        if PLANTED:
            self.add(run.folder, f"{run.step},{run.rank},{run.model.layers[0].weight.norm()}\n")

    def add(self, folder: Path, row: str) -> None:
        table = folder / "weights.csv"
        with locked(folder / "weights.lock"):  # planted
            rows = table.read_text().splitlines(keepends=True) if table.exists() else ROWS
            table.write_text("".join([*rows, row]))  # planted: all rows again


class Patches(DenoiseTask):
    def hooks(self) -> list[Hook]:
        return [SharedTable()]
