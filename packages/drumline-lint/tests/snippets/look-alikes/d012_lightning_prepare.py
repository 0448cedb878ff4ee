"""Text classification in Lightning with a data module that fetches the archive."""
import tarfile
import urllib.request
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from reviews.model import BagOfWords
from reviews.rows import ReviewRows, build_vocab, pad

URL = "https://data.lab.internal/reviews-2024.tar.gz"


class Reviews(L.LightningDataModule):
    def __init__(self, root="/shared/data/reviews", batch=256):
        super().__init__()
        self.prepare_data_per_node = False
        self.root, self.batch = Path(root), batch

    def prepare_data(self):
        if (self.root / "vocab.txt").exists():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        archive = self.root / "reviews.tar.gz"
        urllib.request.urlretrieve(URL, archive)
        with tarfile.open(archive) as fh:
            fh.extractall(self.root)
        words = build_vocab(self.root / "train.jsonl", size=60_000)
        (self.root / "vocab.txt").write_text("\n".join(words), encoding="utf-8")

    def setup(self, stage):
        vocab = (self.root / "vocab.txt").read_text(encoding="utf-8").split("\n")
        self.sets = {k: ReviewRows(self.root / f"{k}.jsonl", vocab) for k in ("train", "val")}

    def train_dataloader(self):
        return DataLoader(self.sets["train"], self.batch, shuffle=True, collate_fn=pad, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.sets["val"], self.batch, collate_fn=pad, num_workers=4)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = BagOfWords(60_000, 5)

    def training_step(self, batch, _):
        ids, y = batch
        return nn.functional.cross_entropy(self.net(ids), y)

    def validation_step(self, batch, _):
        ids, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(ids), y), sync_dist=True, batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(8)
    trainer = L.Trainer(
        accelerator="gpu", devices=8, num_nodes=2, strategy="ddp", max_epochs=12,
        callbacks=[ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(Classifier(), datamodule=Reviews())
    trainer.print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
