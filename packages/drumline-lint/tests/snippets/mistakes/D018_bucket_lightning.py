"""Speech recogniser in Lightning with batches of similar length."""
import random

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Sampler

from asr.conformer import Conformer
from asr.data import Utterances, pad_batch


class LengthBuckets(Sampler):
    """Batches of neighbours in length, in random order of batches."""

    def __init__(self, lengths, batch_size, seed=0):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i:i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
        self.seed, self.epoch = seed, 0

    def __iter__(self):
        batches = list(self.batches)
        random.Random(self.seed + self.epoch).shuffle(batches)
        self.epoch += 1
        yield from batches

    def __len__(self):
        return len(self.batches)


class ASR(L.LightningModule):
    def __init__(self, vocab=1024, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = Conformer(vocab=vocab)
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def _loss(self, batch):
        logp, lens = self.net(batch["wav"], batch["wav_len"])
        return self.ctc(logp.transpose(0, 1), batch["text"], lens, batch["text_len"])

    def training_step(self, batch, _):
        loss = self._loss(batch)
        self.log("train/ctc", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val/ctc", self._loss(batch), sync_dist=True, batch_size=len(batch["wav"]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.LinearLR(opt, 0.01, 1.0, total_iters=10_000)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(2, workers=True)
    train, val = Utterances("data/train.tsv"), Utterances("data/dev.tsv")
    train_dl = DataLoader(
        train, batch_sampler=LengthBuckets(train.lengths, 32), collate_fn=pad_batch, num_workers=8
    )
    val_sampler = None
    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=60,
        use_distributed_sampler=False,  # we bring our own batches
        limit_val_batches=200,
        callbacks=[ModelCheckpoint(monitor="val/ctc", mode="min", save_last=True)],
    )
    val_dl = DataLoader(val, batch_size=32, sampler=val_sampler, collate_fn=pad_batch, num_workers=8)
    trainer.fit(ASR(), train_dl, val_dl)


if __name__ == "__main__":
    main()
