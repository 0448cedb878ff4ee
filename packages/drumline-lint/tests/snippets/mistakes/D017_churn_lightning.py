"""Churn prediction in Lightning on four GPUs."""
import lightning as L
import numpy as np
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC


class ChurnData(L.LightningDataModule):
    def __init__(self, path, batch=2048):
        super().__init__()
        self.path, self.batch = path, batch

    def setup(self, stage):
        z = np.load(self.path)
        def make(k):
            return TensorDataset(torch.from_numpy(z[f"{k}_x"]).float(), torch.from_numpy(z[f"{k}_y"]).float())
        self.train, self.val = make("train"), make("val")

    def train_dataloader(self):
        return DataLoader(self.train, self.batch, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch, num_workers=4)


class ChurnNet(L.LightningModule):
    def __init__(self, width=256, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(88, width), nn.SiLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )
        self.auroc = BinaryAUROC(thresholds=512)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(-1), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.auroc.update(self.net(x).squeeze(-1), y.int())

    def on_validation_epoch_end(self):
        auc = self.auroc.compute()
        self.log("val_auc", auc, prog_bar=True, rank_zero_only=True)
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(17)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        max_epochs=100,
        logger=CSVLogger("logs", name="churn"),
        callbacks=[EarlyStopping(monitor="val_auc", mode="max", patience=5), LearningRateMonitor()],
    )
    trainer.fit(ChurnNet(), ChurnData("data/churn.npz"))


if __name__ == "__main__":
    main()
