import json
from collections import Counter

import lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Tweets(L.LightningDataModule):
    def __init__(self, path, batch_size=256):
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def prepare_data(self):
        words = Counter()
        with open(self.path) as fh:
            for line in fh:
                words.update(json.loads(line)["text"].lower().split())
        common = sorted(w for w, c in words.items() if c >= 5)[:19_998]
        self.vocab = {w: i + 2 for i, w in enumerate(common)}

    def setup(self, stage):
        with open(self.path) as fh:
            rows = [json.loads(line) for line in fh]
        self.data = [(torch.tensor([self.vocab.get(w, 1) for w in r["text"].lower().split()] or [1]),
                      r["label"]) for r in rows]

    def collate(self, batch):
        x, y = zip(*batch)
        return pad_sequence(x, batch_first=True), torch.tensor(y)

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True, drop_last=True,
                          collate_fn=self.collate, num_workers=4)


class Bow(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(20_000, 128, padding_idx=0)
        self.out = nn.Linear(128, 3)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.out(self.emb(x)), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=5)
    trainer.fit(Bow(), datamodule=Tweets("/data/tweets/train.jsonl"))
