import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from traffic import SensorWindows, SpatioTemporalNet


class Forecast(pl.LightningModule):
    def __init__(self, sensors: int, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = SpatioTemporalNet(sensors, hidden=128)
        self.criterion = nn.HuberLoss()

    def forward(self, past):
        return self.net(past)

    def training_step(self, batch, _):
        past, future = batch
        loss = self.criterion(self(past), future)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        past, future = batch
        loss = self.criterion(self(past), future)
        self.log("val_loss", loss, prog_bar=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Traffic(pl.LightningDataModule):
    def setup(self, stage=None):
        self.train_set = SensorWindows("/data/traffic/train.h5")
        self.val_set = SensorWindows("/data/traffic/val.h5")

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=64, shuffle=True, num_workers=6)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=128, num_workers=6)


if __name__ == "__main__":
    pl.seed_everything(0, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        max_epochs=200,
        callbacks=[
            ModelCheckpoint("ckpt", monitor="val_loss", mode="min", save_last=True),
            EarlyStopping("val_loss", patience=10),
        ],
    )
    trainer.fit(Forecast(sensors=325), datamodule=Traffic())
