"""Settings of a run."""
import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path


def new_run_dir():
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path(os.environ.get("RUNS", "runs")) / f"fraud-{stamp}"


@dataclass
class Settings:
    data: str = "/data/fraud"
    epochs: int = 30
    batch: int = 4096
    lr: float = 1e-3
    width: int = 512
    run_dir: Path = field(default_factory=new_run_dir)
