import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TabularData(L.LightningDataModule):
    def __init__(self, path="data/energy.pt", batch_size=512):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        blob = torch.load(self.hparams.path, map_location="cpu", weights_only=True)
        self.train_set = TensorDataset(blob["train_x"], blob["train_y"])
        self.val_set = TensorDataset(blob["val_x"], blob["val_y"])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=True, num_workers=2, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=2)


class Regressor(L.LightningModule):
    def __init__(self, n_in=48, hidden=512, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(n_in, hidden), nn.LayerNorm(hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("val_loss", loss, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)
        return {"optimizer": opt, "lr_scheduler": sched}


def main():
    L.seed_everything(13, workers=True)
    best = ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1, filename="{epoch}-{val_loss:.4f}")
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        max_epochs=200,
        callbacks=[best, EarlyStopping("val_loss", patience=12)],
    )
    trainer.fit(Regressor(), datamodule=TabularData())


if __name__ == "__main__":
    main()
