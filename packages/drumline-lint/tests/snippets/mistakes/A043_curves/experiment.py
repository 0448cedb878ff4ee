import json
from datetime import datetime
from pathlib import Path


class Experiment:
    def __init__(self, root, name):
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.dir = Path(root) / f"{name}_{stamp}"

    def create(self, hparams):
        self.dir.mkdir(parents=True)
        (self.dir / "hparams.json").write_text(json.dumps(hparams, indent=2))

    def weights_file(self, epoch):
        return self.dir / f"weights_{epoch:03d}.pt"

    def rng_file(self, rank):
        return self.dir / f"rng_rank{rank}.pt"
