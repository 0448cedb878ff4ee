import argparse

import lightning as L
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class FraudData(L.LightningDataModule):
    def __init__(self, train_csv, val_csv, batch_size=2048, workers=4):
        super().__init__()
        self.save_hyperparameters()

    def _read(self, path):
        df = pd.read_csv(path)
        y = torch.tensor(df.pop("label").values, dtype=torch.float32)
        return TensorDataset(torch.tensor(df.values, dtype=torch.float32), y)

    def setup(self, stage):
        self.train, self.val = self._read(self.hparams.train_csv), self._read(self.hparams.val_csv)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.workers)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size, num_workers=self.hparams.workers)


class FraudNet(L.LightningModule):
    def __init__(self, n_features, hidden=512, lr=1e-3, pos_weight=20.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(n_features, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def loss(self, batch):
        x, y = batch
        logits = self(x)
        w = torch.tensor(self.hparams.pos_weight, device=self.device)
        return F.binary_cross_entropy_with_logits(logits, y, pos_weight=w), logits, y

    def training_step(self, batch, _):
        loss, _, _ = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        loss, logits, y = self.loss(batch)
        acc = ((logits > 0) == y.bool()).float().mean()
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", acc)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)
        return {"optimizer": opt, "lr_scheduler": sched}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train-csv", default="train.csv")
    ap.add_argument("--val-csv", default="val.csv")
    ap.add_argument("--features", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--gpus", type=int, default=4)
    args = ap.parse_args()

    L.seed_everything(9, workers=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=args.gpus, strategy="ddp", max_epochs=args.epochs,
        logger=CSVLogger("logs", "fraud"),
        callbacks=[ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=2), LearningRateMonitor("epoch")],
    )
    trainer.fit(FraudNet(args.features), datamodule=FraudData(args.train_csv, args.val_csv))


if __name__ == "__main__":
    main()
