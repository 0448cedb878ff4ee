"""Tabular churn model with Lightning on 4 GPUs."""
import argparse

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ChurnData(L.LightningDataModule):
    def __init__(self, path, bs):
        super().__init__()
        self.path, self.bs = path, bs

    def setup(self, stage=None):
        df = pd.read_parquet(self.path)
        y = torch.tensor(df.pop("churned").values).float()
        x = torch.tensor(df.values).float()
        n = int(0.85 * len(x))
        self.train, self.val = TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:])

    def train_dataloader(self):
        return DataLoader(self.train, self.bs, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val, self.bs, num_workers=4)


class Churn(L.LightningModule):
    def __init__(self, n_features, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(n_features, 256), nn.SiLU(), nn.Dropout(0.2),
                                 nn.Linear(256, 64), nn.SiLU(), nn.Linear(64, 1))
        self.crit = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = self.crit(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self(x)
        acc = ((logits > 0).float() == y).float().mean()
        self.log("val_loss", self.crit(logits, y), on_epoch=True, prog_bar=True)
        self.log("val_acc", acc, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--path", required=True)
    ap.add_argument("--features", type=int, default=83)
    args = ap.parse_args()
    L.seed_everything(5, workers=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", max_epochs=50,
        callbacks=[EarlyStopping("val_loss", patience=5), ModelCheckpoint(monitor="val_loss", save_top_k=1)],
    )
    trainer.fit(Churn(args.features), datamodule=ChurnData(args.path, 1024))


if __name__ == "__main__":
    main()
