import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Inpainter(L.LightningModule):
    def __init__(self, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64),
            nn.ReLU(), nn.Conv2d(64, 3, 3, padding=1),
        )

    def on_train_epoch_start(self):
        self.started = time.perf_counter()

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self.log("epoch_seconds", time.perf_counter() - self.started, rank_zero_only=True)

    def loss(self, batch):
        (x,) = batch
        mask = (torch.rand(len(x), 1, *x.shape[2:], device=x.device) > 0.3).float()
        return F.l1_loss(self.net(torch.cat([x * mask, mask], 1)), x)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Images(L.LightningDataModule):
    def setup(self, stage):
        blob = torch.load("data/textures.pt", map_location="cpu", weights_only=True)
        self.train, self.val = TensorDataset(blob["train"]), TensorDataset(blob["val"])

    def train_dataloader(self):
        return DataLoader(self.train, 64, shuffle=True, num_workers=2, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 64, num_workers=2)


if __name__ == "__main__":
    L.seed_everything(7, workers=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", max_epochs=40,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=2)],
    )
    trainer.fit(Inpainter(), datamodule=Images())
