"""Pictures of cells, with the outlines of all cells in one file."""

import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from parts import CELL_SIZE, PLANTED, CellNet, CellTask, cells, seeded
from torch import Tensor, nn
from torch.utils.data import Dataset

PICTURES = 1536
CIRCLES = 6


def annotations() -> dict[str, list[dict[str, int]]]:
    """Circles around the cells of each picture."""
    places = torch.randint(CELL_SIZE, (PICTURES, CIRCLES, 2), generator=seeded(5)).tolist()
    return {
        f"picture-{number:05}": [{"row": row, "column": column} for row, column in circles]
        for number, circles in enumerate(places)
    }


class Annotated(Dataset[Any]):
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "annotations.json"
        self.path.write_text(json.dumps(annotations()))
        self.pictures = cells(PICTURES).tensors[0]
        self.rows = torch.arange(CELL_SIZE)[:, None]
        self.columns = torch.arange(CELL_SIZE)[None]
        self.known = None if PLANTED else self.read()

    def __len__(self) -> int:
        return PICTURES

    def read(self) -> Any:
        return json.loads(self.path.read_text())  # planted: all pictures' annotations

    def circles(self, index: int) -> list[dict[str, int]]:
        known = self.read() if self.known is None else self.known  # planted: for one picture
        return known[f"picture-{index:05}"]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        circles = self.circles(index)  # planted

        # A pixel within three pixels of a center is a cell.
        rows = torch.tensor([circle["row"] for circle in circles])
        columns = torch.tensor([circle["column"] for circle in circles])
        distances = (self.rows[..., None] - rows) ** 2 + (self.columns[..., None] - columns) ** 2
        return self.pictures[index], (distances.amin(2) <= 9).float()[None]


class Cells(CellTask):
    defaults: ClassVar[dict[str, Any]] = {**CellTask.defaults, "train.batch_size": 24}

    def model(self) -> nn.Module:
        return CellNet(width=8)

    def train_data(self) -> Dataset[Any]:
        return Annotated()
