from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass
class Experiment:
    name: str
    root: str = "runs"

    def __post_init__(self):
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self.dir = Path(self.root) / f"{self.name}-{stamp}"
        self.pred_dir = self.dir / "predictions"

    def create(self):
        self.pred_dir.mkdir(parents=True, exist_ok=True)

    def shard(self, rank):
        return self.pred_dir / f"rank{rank:03d}.pt"
