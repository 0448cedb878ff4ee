import collections
import os

import lightning as L
import torch
from datasets import load_dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class IMDB(L.LightningDataModule):
    def __init__(self, cache="/data/hf", batch_size=64, vocab_size=20000):
        super().__init__()
        self.cache, self.batch_size, self.vocab_size = cache, batch_size, vocab_size

    def prepare_data(self):
        ds = load_dataset("imdb", cache_dir=self.cache)
        self.train_rows = [(r["text"].lower().split()[:400], r["label"]) for r in ds["train"]]
        counts = collections.Counter(w for toks, _ in self.train_rows for w in toks)
        self.vocab = {w: i + 2 for i, (w, _) in enumerate(counts.most_common(self.vocab_size))}

    def setup(self, stage):
        self.train = [(torch.tensor([self.vocab.get(w, 1) for w in toks]), y)
                      for toks, y in self.train_rows]

    def collate(self, batch):
        xs, ys = zip(*batch)
        return pad_sequence(xs, batch_first=True), torch.tensor(ys)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate,
                          num_workers=2, drop_last=True)


class TextCNN(L.LightningModule):
    def __init__(self, vocab_size=20000, dim=128):
        super().__init__()
        self.emb = nn.Embedding(vocab_size + 2, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 100, k, padding=k // 2) for k in (3, 5, 7))
        self.out = nn.Sequential(nn.Dropout(0.5), nn.Linear(300, 2))

    def forward(self, x):
        h = self.emb(x).transpose(1, 2)
        return self.out(torch.cat([c(h).relu().amax(-1) for c in self.convs], -1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def main():
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=10,
                        default_root_dir=os.environ.get("RUN_DIR", "runs/imdb"))
    trainer.fit(TextCNN(), datamodule=IMDB())


if __name__ == "__main__":
    main()
