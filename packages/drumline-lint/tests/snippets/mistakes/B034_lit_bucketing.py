import json
import random

import lightning.pytorch as pl
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import MarianConfig, MarianMTModel


class Pairs(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(x) for x in f]

    def __len__(self):
        return len(self.rows)

    def length(self, i):
        return len(self.rows[i]["src"])

    def __getitem__(self, i):
        return torch.tensor(self.rows[i]["src"]), torch.tensor(self.rows[i]["tgt"])


class LengthBuckets(Sampler):
    def __init__(self, data, batch_size, seed=0):
        self.order = sorted(range(len(data)), key=data.length)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.order) // self.batch_size

    def __iter__(self):
        starts = list(range(0, len(self.order) - self.batch_size + 1, self.batch_size))
        random.Random(self.seed + self.epoch).shuffle(starts)
        for s in starts:
            yield self.order[s : s + self.batch_size]


def collate(batch):
    src = pad_sequence([b[0] for b in batch], True, 0)
    tgt = pad_sequence([b[1] for b in batch], True, -100)
    return {"input_ids": src, "attention_mask": src.ne(0).long(), "labels": tgt}


class Translator(pl.LightningModule):
    def __init__(self, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = MarianMTModel(MarianConfig(vocab_size=32000, decoder_vocab_size=32000, pad_token_id=0))

    def training_step(self, batch, _):
        loss = self.net(**batch).loss
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    pl.seed_everything(12)
    data = Pairs("data/en-de.jsonl")
    loader = DataLoader(data, batch_sampler=LengthBuckets(data, 64), collate_fn=collate, num_workers=4)
    trainer = pl.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=20, use_distributed_sampler=False)
    trainer.fit(Translator(), loader)
