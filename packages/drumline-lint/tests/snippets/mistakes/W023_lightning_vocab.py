import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from reviews import ReviewDataset, build_vocab, download, pad


class Reviews(L.LightningDataModule):
    def __init__(self, root="/data/reviews", batch_size=64):
        super().__init__()
        self.root = root
        self.batch_size = batch_size

    def prepare_data(self):
        download(self.root)
        self.vocab = build_vocab(f"{self.root}/train.jsonl", min_count=5)

    def setup(self, stage):
        self.train = ReviewDataset(f"{self.root}/train.jsonl", self.vocab)
        self.val = ReviewDataset(f"{self.root}/val.jsonl", self.vocab)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=pad, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, collate_fn=pad, num_workers=4)


class Sentiment(L.LightningModule):
    def __init__(self, vocab_size=50_000):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 128, padding_idx=0)
        self.rnn = nn.GRU(128, 256, batch_first=True)
        self.out = nn.Linear(256, 5)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[1][-1])

    def training_step(self, batch, batch_idx):
        tokens, stars = batch
        loss = F.cross_entropy(self(tokens), stars)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, stars = batch
        self.log("val_loss", F.cross_entropy(self(tokens), stars), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=10)
    trainer.fit(Sentiment(), datamodule=Reviews())
