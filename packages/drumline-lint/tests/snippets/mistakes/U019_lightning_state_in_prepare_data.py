import json
from collections import Counter
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from ner.data import TagDataset, download_conll, read_sentences
from ner.model import BiLSTMTagger


class ConllDataModule(pl.LightningDataModule):
    def __init__(self, root="data/conll", batch_size=64, min_freq=2):
        super().__init__()
        self.root = Path(root)
        self.batch_size = batch_size
        self.min_freq = min_freq

    def prepare_data(self):
        if not (self.root / "train.txt").exists():
            download_conll(self.root)
        words, tags = Counter(), Counter()
        for sent in read_sentences(self.root / "train.txt"):
            words.update(tok for tok, _ in sent)
            tags.update(tag for _, tag in sent)
        kept = [w for w, n in words.items() if n >= self.min_freq]
        self.vocab = {w: i + 2 for i, w in enumerate(sorted(kept))}
        self.tagset = {t: i for i, t in enumerate(sorted(tags))}
        (self.root / "stats.json").write_text(json.dumps(tags))

    def setup(self, stage=None):
        self.train = TagDataset(self.root / "train.txt", self.vocab, self.tagset)
        self.val = TagDataset(self.root / "dev.txt", self.vocab, self.tagset)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=4,
                          collate_fn=TagDataset.collate)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4, collate_fn=TagDataset.collate)


if __name__ == "__main__":
    pl.seed_everything(0)
    dm = ConllDataModule()
    model = BiLSTMTagger(vocab_size=32_000, n_tags=9, lr=1e-3)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=4,
        num_nodes=1,
        strategy="ddp",
        max_epochs=25,
        gradient_clip_val=5.0,
        callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_f1", mode="max")],
    )
    trainer.fit(model, datamodule=dm)
